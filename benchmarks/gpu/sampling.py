"""What each way of sampling costs a service on a GPU, in tokens per second.

``python -m benchmarks.gpu.sampling [--out OUT.json]`` on a host with a GPU and torch: 64 sequences of 32 + 64 tokens of
Qwen3-0.6B shapes over HTTP, one way after the other, best of `--rounds`.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.report import add_out, on_gpus, report
from benchmarks.gpu.service import EmptyService
from benchmarks.gpu.shapes import SHAPES
from rollout_client import AsyncRolloutClient, WeightPublisher
from weight_manager.families import manifest_for

MODEL = "Qwen3-0.6B"
SEQUENCES, PROMPT, TOKENS = 64, 32, 64
ALLOWED = list(range(1000, 60_000, 7))
WAYS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "repetition penalty, 3 logprobs": {"repetition_penalty": 1.2, "logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 0},
    "prompt logprobs, 5 likeliest": {"prompt_logprobs": 5},
    "repetition penalty": {"repetition_penalty": 1.2},
    "all penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "logprobs 1": {"logprobs": 1},
    "logprobs 5": {"logprobs": 5},
    "bias of 100 ids": {"logit_bias": {str(i): -1.0 for i in range(5000, 5100)}},
    "8,429 ids allowed": {"allowed_token_ids": ALLOWED},
    "top_p 0.9": {"top_p": 0.9},
    "top_p 0.9, repetition penalty": {"top_p": 0.9, "repetition_penalty": 1.2},
}
SETTINGS = (
    f"worker.max_batch={SEQUENCES}",
    "worker.max_tokens_per_step=4096",
    "worker.max_model_len=2048",
    "worker.num_blocks=4096",
    "api.log_level=warning",
)


def tensors(torch: Any) -> dict[str, Any]:
    """Random weights on the device."""
    generator = torch.Generator("cuda").manual_seed(0)
    made = {}
    for parameter in manifest_for(SHAPES[MODEL], "bfloat16").parameters:
        tensor = torch.empty(parameter.shape, dtype=torch.bfloat16, device="cuda")
        norm = parameter.name.endswith("norm.weight")
        made[parameter.name] = tensor.fill_(1.0) if norm else tensor.normal_(0, 0.03, generator=generator)
    return made


async def rate(client: AsyncRolloutClient, seed: int, fields: dict[str, Any]) -> float:
    """Tokens per second of one round, prompts that no cache has."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1000, 60_000, PROMPT).tolist() for _ in range(SEQUENCES)]
    asked = {"max_tokens": TOKENS, "ignore_eos": True, "seed": seed} | fields
    began = time.perf_counter()
    replies = await asyncio.gather(*(client.generate(prompt_ids=prompt, **asked) for prompt in prompts))
    seconds = time.perf_counter() - began
    tokens = sum(len(output.token_ids) for reply in replies for output in reply.outputs)
    assert tokens == SEQUENCES * TOKENS, f"{tokens} tokens came"
    return tokens / seconds


async def measured(url: str, rounds: int) -> dict[str, float]:
    client = AsyncRolloutClient(url)
    found: dict[str, float] = {}
    for turn in range(rounds):
        for number, (name, fields) in enumerate(WAYS.items()):
            found[name] = max(found.get(name, 0.0), await rate(client, 1000 * turn + number, fields))
    await client.aclose()
    return {name: round(value) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.sampling", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    add_out(parser)
    args = parser.parse_args()
    import torch

    log = Path(tempfile.mkdtemp(prefix="sampling-")) / "service.log"
    options = on_gpus(SETTINGS)
    with (
        EmptyService(SHAPES[MODEL], 1, log, *options) as service,
        WeightPublisher(service.push_endpoint, run_id="sampling", transport="shm") as publisher,
    ):
        publisher.push(tensors(torch), 1)
        service.wait_ready()
        result = {"card": torch.cuda.get_device_name(), "tokens_per_s": asyncio.run(measured(service.url, args.rounds))}
    report(result, args.out)


if __name__ == "__main__":
    main()
