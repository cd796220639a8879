"""Pushes through shared memory to eight replicas of one host against pushes to one: two services side by side.

Both are idle but for the pushes, which alternate. Needs memory for two arenas and nine replicas.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.service import SMALL_KV, EmptyService
from benchmarks.gpu.shapes import SHAPES
from benchmarks.push import source
from benchmarks.push.rounds import Pusher, load, middle, write
from rollout_client import WeightPublisher
from weight_manager.families import manifest_for


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.push.replicas", description=__doc__)
    parser.add_argument("--shapes", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--many", type=int, default=8)
    args = parser.parse_args()
    shapes = {p.name: p.shape for p in manifest_for(SHAPES[args.shapes], "float32").parameters}
    result: dict[str, Any] = {"model": args.shapes, "replicas": [1, args.many], "rounds": []}
    small = (*SMALL_KV, "--dtype", "float32")
    with tempfile.TemporaryDirectory(prefix="bench-replicas-", dir="/dev/shm") as scratch:
        tensors = source.read(source.write(Path(scratch), shapes))[1]
        with (
            EmptyService(SHAPES[args.shapes], 1, Path(scratch) / "log1", *small, "--name", "bench-one") as one,
            EmptyService(SHAPES[args.shapes], args.many, Path(scratch) / "log8", *small) as many,
            WeightPublisher(one.push_endpoint, run_id="push", transport="shm", progress=False) as to_one,
            WeightPublisher(many.push_endpoint, run_id="push", transport="shm", progress=False) as to_many,
        ):
            first, second = Pusher(tensors), Pusher(tensors)
            for service, pusher, publisher in ((one, first, to_one), (many, second, to_many)):
                pusher.push(publisher)
                service.wait_ready()
                pusher.push(publisher)
            for _ in range(args.rounds):
                took = {"load": load(), "one": first.push(to_one), "many": second.push(to_many)}
                result["rounds"].append(took)
                print(took["load"], took["one"]["total"], took["many"]["total"], flush=True)
    ratio = middle(r["many"]["total"] / r["one"]["total"] for r in result["rounds"])
    write("replicas", result, {"many_over_one": ratio}, {"many_over_one": ("<=", 1.2)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
