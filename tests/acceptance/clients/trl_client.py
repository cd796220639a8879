"""TRL's VLLMClient, as server mode and the distillation trainers use it: completions, chats with tools, scoring."""

import json
import sys

from trl.generation import vllm_generation

from rollout_client.adapters.trl_server import install

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
PROMPTS = [[5, 6, 7, 8], [40, 41, 42]]

url, endpoint = sys.argv[1:]
install(endpoint, run_id="trl-client")
client = vllm_generation.VLLMClient(base_url=url)
made = client.generate(PROMPTS, n=2, max_tokens=8)
assert made["prompt_ids"] == PROMPTS
assert [len(row) for row in made["completion_ids"]] == [len(row) for row in made["logprobs"]]

prompts = [prompt for prompt in PROMPTS for _ in range(2)]
sequences = [prompt + ids for prompt, ids in zip(prompts, made["completion_ids"], strict=True)]
scored = client.get_sequence_logprobs(sequences, [len(prompt) for prompt in prompts])  # 100 alternatives
assert all(len(token) == 100 for row in scored["logprobs"] for token in row)
apart = max(
    abs(one[0] - other[0])
    for row, others in zip(made["logprobs"], scored["actual_logprobs"], strict=True)
    for one, other in zip(row, others, strict=True)
)

chat = client.chat([[{"role": "user", "content": "Add one and two."}]], n=2, max_tokens=8, tools=[TOOL])
assert len(chat["completion_ids"]) == 2
assert len(chat["prompt_ids"]) == 1
print(json.dumps({"apart": apart, "tokens": sum(map(len, made["completion_ids"]))}))
