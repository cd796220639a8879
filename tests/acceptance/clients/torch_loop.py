"""The loop of docs/trainers/torch.md, with a transformers model for `model` and a step of Adam for `train`.

Every sample's logprobs are computed again by torch, from the weights that were pushed for it.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM

from rollout_client import RolloutClient
from rollout_client.adapters.metrics import flat
from rollout_client.adapters.push import Pusher

url, endpoint, directory, steps = sys.argv[1:]
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
prompts = [[5, 6, 7, 8], [40, 41, 42]]
apart, versions = [], []


def train(samples):
    """One step towards longer runs of even tokens. Also: how far its logprobs are from the service's."""
    losses = []
    for sample in samples:
        prompt = prompts[sample.prompt_index]
        ids = torch.tensor([prompt + sample.token_ids])
        logprobs = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1].float(), -1)
        own = logprobs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        apart.append((own.detach() - torch.tensor(sample.logprobs)).abs().max().item())
        reward = sum(i % 2 == 0 for i in sample.token_ids) / len(sample.token_ids)
        losses.append(-(reward - 0.5) * own.sum())
    optimizer.zero_grad()
    torch.stack(losses).mean().backward()
    optimizer.step()


with Pusher(endpoint, run_id="torch-loop") as push, RolloutClient(url) as rollouts:
    push(model.state_dict())
    for _ in range(int(steps)):
        samples = rollouts.generate(prompt_ids=prompts, n=4, max_tokens=12, ignore_eos=True).outputs
        versions.append(sorted({span.version for sample in samples for span in sample.spans}))
        train(samples)
        push(model.state_dict())
    counters = flat(push.counters)
print(json.dumps({"apart": max(apart), "versions": versions, "counters": counters}))
