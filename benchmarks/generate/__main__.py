"""Tokens per second: this service against vLLM's CPU build and HF transformers, on the same prompts.

    python -m benchmarks.generate [--dtype float32 bfloat16] [--rounds 5] [--peers vllm,hf]

SmolLM2-135M, temperature 1, logprob of every token, both cores for each side. Cases: 1, 16 and 64 sequences of
32 prompt tokens and 96 new ones, and `group`: 8 prompts of 256 tokens with 8 samples each. In a round every
contender runs every case once, with prompts never seen before; the order turns from round to round. Ratios are taken
within a round; the table shows their medians.
"""

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.generate import install
from benchmarks.generate.contenders import Contender, Job, Peer, Service

MODEL = Path("models/SmolLM2-135M-Instruct")
NEW_TOKENS = 96
CASES = {"1": (1, 32, 1), "16": (16, 32, 1), "64": (64, 32, 1), "group": (8, 256, 8)}
"""name -> (prompts, tokens of a prompt, samples of a prompt)"""
OURS = "service"
console = Console(width=110)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", default="vllm,hf", help="comma-separated; empty leaves them out")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/generate.json"))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # contenders are closed on the way out
    peers = [peer for peer in args.peers.split(",") if peer]
    result: dict[str, Any] = {
        "model": args.model.name,
        "new_tokens": NEW_TOKENS,
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "processor": _processor(),
            "python": platform.python_version(),
        },
        "dtypes": {},
    }
    for dtype in args.dtype:
        result["dtypes"][dtype] = compare(args.model, dtype, peers, args.rounds)
        show(dtype, result["dtypes"][dtype])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def compare(model: Path, dtype: str, peers: list[str], rounds: int) -> dict[str, Any]:
    """Rounds of all cases over all contenders: {"ready_s": .., "rounds": [{case: {name: tokens/s}}]}."""
    contenders: list[Contender] = []
    logs = Path(tempfile.mkdtemp(prefix="bench-generate-log-"))
    random = np.random.default_rng(7)
    try:
        for peer in peers:
            python = install.vllm() if peer == "vllm" else install.transformers()
            contenders.append(Peer(peer, python, f"{peer}_peer.py", model, dtype, logs / f"{peer}.log"))
        contenders.append(Service(OURS, model, dtype, logs / "service.log"))
        taken = [one_round(contenders, random, number) for number in range(-1, rounds)]
        return {"ready_s": {c.name: round(c.ready_s, 2) for c in contenders}, "rounds": taken[1:]}
    except Exception:
        console.print(f"logs: {logs}")
        raise
    finally:
        for contender in contenders:
            contender.close()


def one_round(contenders: list[Contender], random: np.random.Generator, number: int) -> dict[str, Any]:
    """Every case on every contender; round -1 warms up and is thrown away."""
    turned = contenders[number % len(contenders) :] + contenders[: number % len(contenders)]
    took: dict[str, Any] = {"load": round(os.getloadavg()[0], 2)}
    for case, (count, length, samples) in CASES.items():
        prompts = random.integers(1000, 40000, (count, length)).tolist()
        job = Job(prompts, samples, NEW_TOKENS)
        took[case] = {contender.name: round(contender.run(job), 1) for contender in turned}
        console.print(f"round {number + 1}, {case}: {took[case]}")
    return took


def show(dtype: str, measured: dict[str, Any]) -> None:
    """Medians, and the median of each round's ratio to the service."""
    rounds = measured["rounds"]
    table = Table("case", *(f"{name} tokens/s (service / it)" for name in rounds[0]["1"]), title=dtype)
    for case in CASES:
        cells = []
        for name in rounds[0][case]:
            rate = median(taken[case][name] for taken in rounds)
            ratio = median(taken[case][OURS] / taken[case][name] for taken in rounds)
            cells.append(f"{rate:.0f} ({ratio:.2f})")
        table.add_row(case, *cells)
    console.print(table)
    console.print(f"seconds to ready: {measured['ready_s']}")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
