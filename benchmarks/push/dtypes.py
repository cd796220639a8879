"""bfloat16 tensors to replicas that serve bfloat16, and to replicas that serve float32, each against limit A.

Limit A is one memmove of as many bytes as the served version has: for float32, of the bytes written.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.service import SMALL_KV, EmptyService
from benchmarks.gpu.shapes import SHAPES
from benchmarks.push import limits, source
from benchmarks.push.rounds import Pusher, as_bf16, load, middle, write
from rollout_client import WeightPublisher
from weight_manager.families import manifest_for


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.push.dtypes", description=__doc__)
    parser.add_argument("--shapes", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=2)
    args = parser.parse_args()
    shapes = {p.name: p.shape for p in manifest_for(SHAPES[args.shapes], "float32").parameters}
    result: dict[str, Any] = {"model": args.shapes, "replicas": args.replicas, "served": {}}
    ratios = {}
    with tempfile.TemporaryDirectory(prefix="bench-dtypes-", dir="/dev/shm") as scratch:
        path = source.write(Path(scratch), shapes)
        tensors, nbytes = as_bf16(path)
        for served in ("bfloat16", "float32"):
            rounds = []
            options = (*SMALL_KV, "--dtype", served)
            with (
                EmptyService(SHAPES[args.shapes], args.replicas, Path(scratch) / "log", *options) as service,
                WeightPublisher(service.push_endpoint, run_id="push", transport="shm", progress=False) as near,
            ):
                service.wait_settled()
                pusher = Pusher(tensors)
                pusher.push(near)
                service.wait_ready()
                pusher.push(near)
                pusher.push(near)
                for _ in range(args.rounds):
                    took: dict[str, Any] = {"load": load()}
                    whole = limits.copy_seconds(path)["flat"]
                    took["limit_a"] = whole if served == "float32" else whole * nbytes / path.stat().st_size
                    took["push"] = pusher.push(near)
                    rounds.append(took)
                    print(served, took["load"], round(took["limit_a"], 3), took["push"]["total"], flush=True)
            result["served"][served] = rounds
            ratios[f"limit_a_over_push_to_{served}"] = middle(r["limit_a"] / r["push"]["total"] for r in rounds)
    bars = {"limit_a_over_push_to_bfloat16": (">=", 0.60), "limit_a_over_push_to_float32": (">=", 0.25)}
    write("dtypes", result, ratios, bars)
    return 0


if __name__ == "__main__":
    sys.exit(main())
