"""verifiers' ToolEnv, unmodified, with its client of token ids: every turn begins with the one before."""

import itertools
import json
import sys

import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig

(url,) = sys.argv[1:]
TURNS = 3


async def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: one of them
        b: the other
    """
    return str(a + b)


def has_calls(completion) -> float:
    return float(any(getattr(message, "tool_calls", None) for message in completion))


env = vf.ToolEnv(
    dataset=Dataset.from_list([{"question": f"What is {i} + 2?", "answer": str(i + 2)} for i in range(4)]),
    tools=[add],
    rubric=vf.Rubric(funcs=[has_calls]),
    max_turns=TURNS,
)
config = ClientConfig(
    client_type="openai_chat_completions_token", api_base_url=f"{url}/v1", api_key_var="NO_KEY", max_retries=0
)
sampling = {
    "max_tokens": 80,
    "temperature": 0.7,
    "tool_choice": "required",  # a model of this size calls nothing of itself
    "parallel_tool_calls": False,
}
found = env.generate_sync(
    env.get_dataset().to_list(),
    client=config,
    model="default",
    sampling_args=sampling,
    state_columns=["trajectory"],
    max_concurrent=4,
)
outputs = found["outputs"]
assert [output["reward"] for output in outputs] == [1.0] * 4, [output.get("error") for output in outputs]
turns = [output["trajectory"] for output in outputs]
exact = True
calls = 0
for trajectory in turns:
    assert len(trajectory) == TURNS
    for before, after in itertools.pairwise(trajectory):
        known = before["tokens"]["prompt_ids"] + before["tokens"]["completion_ids"]
        exact = exact and after["tokens"]["prompt_ids"][: len(known)] == known
    for step in trajectory:
        tokens = step["tokens"]
        assert len(tokens["completion_ids"]) == len(tokens["completion_logprobs"])
        calls += sum(len(message.tool_calls or []) for message in step["completion"])
print(json.dumps({"exact": exact, "calls": calls}))
