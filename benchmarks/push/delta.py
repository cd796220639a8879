"""One value in a hundred changed, over a link of 1 Gbit/s: a delta push against a dense one. Root, iproute2.

Two network namespaces joined by a veth pair that `tc tbf` shapes (relay_chain.line). Each round changes one per cent of
the bfloat16 values, pushes them whole, changes them again, and pushes what differs; both digests are compared with
those of a push of the same bytes by the other way.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.shapes import SHAPES
from benchmarks.push.rounds import Bits, load, middle, write
from benchmarks.relay_chain import TOKEN, chain, line
from rollout_client import WeightPublisher
from weight_manager.families import manifest_for

SHARE = 0.01
LIMIT_S = 500


def trainer(endpoint: str, shapes_name: str, rounds: int) -> None:
    """In the trainer's namespace."""
    rng = np.random.default_rng(0)
    parameters = manifest_for(SHAPES[shapes_name], "bfloat16").parameters
    bits = {p.name: rng.integers(0, 0x3FFF, p.shape, np.uint16) for p in parameters}
    tensors = {name: Bits(b) for name, b in bits.items()}

    def change() -> None:
        for b in bits.values():
            flat = b.reshape(-1)
            flat[rng.integers(0, flat.size, max(1, int(flat.size * SHARE)))] ^= 1

    sent = Path("/sys/class/net/up0/statistics/tx_bytes")
    options: dict[str, Any] = {"run_id": "bench", "token": TOKEN, "transport": "zmq", "progress": False}
    found, version = [], 0
    with WeightPublisher(endpoint, **options) as dense, WeightPublisher(endpoint, delta=True, **options) as delta:
        for _ in range(rounds):
            took: dict[str, Any] = {"load": load()}
            for way, publisher in (("dense", dense), ("base", delta), ("delta", delta), ("check", dense)):
                if way in ("dense", "delta"):
                    change()
                version += 1
                before = int(sent.read_text())
                report = publisher.push(tensors, version, timeout_s=120)
                took[way] = report.seconds | {"sent": report.sent, "on_the_wire": int(sent.read_text()) - before}
                took[f"{way}_digest"] = report.digest
            took["equal"] = took["delta_digest"] == took["check_digest"] and took["dense_digest"] == took["base_digest"]
            found.append(took)
    print(json.dumps(found))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.push.delta", description=__doc__)
    parser.add_argument("--shapes", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--as-trainer", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_trainer:
        trainer(args.as_trainer, args.shapes, args.rounds)
        return 0
    scratch = Path(tempfile.mkdtemp(prefix="bench-delta-", dir="/dev/shm"))
    try:
        model = scratch / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(SHAPES[args.shapes]))
        with line(2, args.rate) as names, chain(scratch, names, model, dtype="bfloat16", threads=2) as endpoint:
            command = [sys.executable, "-m", "benchmarks.push.delta", "--as-trainer", endpoint]
            command += ["--shapes", args.shapes, "--rounds", str(args.rounds)]
            done = subprocess.run(
                ["ip", "netns", "exec", names[0], *command], check=True, timeout=LIMIT_S, stdout=subprocess.PIPE
            )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    rounds = json.loads(done.stdout.splitlines()[-1])
    for r in rounds:
        print(r["load"], "dense", r["dense"]["total"], "delta", r["delta"], "equal", r["equal"], flush=True)
    result = {"model": args.shapes, "rate": args.rate, "share_changed": SHARE, "rounds": rounds}
    result["bit_equal"] = all(r["equal"] for r in rounds)
    ratio = middle(r["dense"]["total"] / r["delta"]["total"] for r in rounds)
    write("delta", result, {"dense_over_delta": ratio}, {"dense_over_delta": (">=", 20.0)})
    return int(not result["bit_equal"])


if __name__ == "__main__":
    sys.exit(main())
