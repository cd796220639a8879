"""Tokens a second of the service on a GPU over HTTP, with a logprob for each; of a peer on the same card in alternated
rounds.

    python -m benchmarks.gpu.throughput [--peer http://HOST:PORT] [--adapters N] [--rounds 5] [--out OUT.json]

Qwen3-0.6B's shape with random weights in bfloat16, pushed by a torch trainer on the card. Answers come whole, on
OpenAI's route for completions, which both have; prompts are new in every round, of token ids; no seeds. The peer is
vLLM's server, started before by peer.sh beside this file and idle while ours is asked. Medians and best of the rounds.

--adapters: 16 and 64 sequences of the base, and of N adapters of rank 16 over all linears in turn, which both servers
load from a directory (peer.sh with --enable-lora --max-loras N --max-lora-rank 16); "of the base" is what is left.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gpu.direct import Trainer
from benchmarks.gpu.made_up import adapter, directory
from benchmarks.gpu.report import add_out, on_gpus, report
from benchmarks.gpu.service import EmptyService
from benchmarks.host.client import Load, run

CELLS = {str(n): Load(n, 256, streamed=False, openai=True, seeded=False) for n in (1, 16, 64, 256)}
PREFILL = {"prefill 64 x 1024": Load(64, 1, streamed=False, prompt=1024, openai=True, seeded=False)}
"""Tokens a second are the prompts' here."""
RANK, ADAPTED = 16, (16, 64)
SETTINGS = (
    "worker.max_batch=256",
    "worker.max_tokens_per_step=8192",
    "worker.max_model_len=2048",
    "worker.num_blocks=11700",
    "api.log_level=warning",
)


def tokens(load: Load) -> int:
    """What is counted of a load."""
    return load.sequences * load.prompt if load.tokens == 1 else load.total


def with_adapters(count: int) -> dict[str, Load]:
    """Cells of the base, and the same of so many adapters."""
    named, cells = tuple(f"a{number}" for number in range(count)), {}
    for sequences in ADAPTED:
        cells[f"{sequences}"] = CELLS[str(sequences)]
        cells[f"{sequences}, adapters"] = replace(CELLS[str(sequences)], models=named)
    return cells


def load_adapters(servers: dict[str, str], count: int, directory: Path) -> None:
    """Into every server, by the route that both have."""
    for number in range(count):
        path = adapter(directory / f"a{number}", RANK, number)
        for url in servers.values():
            body = {"lora_name": f"a{number}", "lora_path": str(path)}
            httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=120.0).raise_for_status()


def in_turns(servers: dict[str, str], rounds: int, cells: dict[str, Load]) -> dict[str, dict[str, list[float]]]:
    """Tokens a second of each round, by server and cell. The first round warms up, and is left out."""
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in servers}
    numbers = count(0, 257)
    for turn in range(rounds + 1):
        for cell, load in cells.items():
            for name in sorted(servers, reverse=bool(turn % 2)):
                fresh = replace(load, first=next(numbers))
                seconds = run(servers[name], fresh)
                if turn:
                    found[name][cell].append(round(tokens(load) / seconds))
    return found


def summary(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Medians and best, and ours over the peer's: of the medians, and the least of one round."""
    result: dict[str, Any] = {
        name: {
            cell: {"median": statistics.median(rates), "best": max(rates), "all": rates} for cell, rates in of.items()
        }
        for name, of in found.items()
    }
    for of in result.values():
        for cell in of:
            if f"{cell}, adapters" in of:
                of[f"{cell}, adapters"]["of the base"] = round(
                    of[f"{cell}, adapters"]["median"] / of[cell]["median"], 3
                )
    for name in found.keys() - {"ours"}:
        pairs = {cell: list(zip(found["ours"][cell], found[name][cell], strict=True)) for cell in found["ours"]}
        result[f"over {name}"] = {
            cell: {
                "of medians": round(result["ours"][cell]["median"] / result[name][cell]["median"], 2),
                "least": round(min(ours / theirs for ours, theirs in both), 2),
            }
            for cell, both in pairs.items()
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--peer", help="URL of a server that is there already")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the model")
    parser.add_argument("--adapters", type=int, default=0, help="of so many adapters, beside the base")
    parser.add_argument("--set", action="append", default=[], help="passed on to serve")
    add_out(parser)
    args = parser.parse_args()
    import torch

    scratch = Path(tempfile.mkdtemp(prefix="throughput-"))
    options = on_gpus((*SETTINGS, *args.set), "--tp", str(args.tp))
    began = time.perf_counter()
    model = directory(scratch / "model")  # files below it may be loaded
    with EmptyService(model, 1, scratch / "service.log", *options) as service:
        trainer = Trainer(torch, service.push_endpoint)
        trainer.push("shm")
        while service.metric("rollout_replica_ready") != 1:
            time.sleep(0.05)
        ready = round(time.perf_counter() - began, 2)
        servers = {"ours": service.url} | ({"vllm": args.peer.rstrip("/")} if args.peer else {})
        load_adapters(servers, args.adapters, model)
        found = in_turns(servers, args.rounds, with_adapters(args.adapters) if args.adapters else CELLS | PREFILL)
    result = {"card": torch.cuda.get_device_name(), "ready_s": ready} | summary(found)
    report(result, args.out)


if __name__ == "__main__":
    main()
