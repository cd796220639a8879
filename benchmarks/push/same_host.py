"""Pushes against what memory and a TCP socket allow, and against other ways of moving the same bytes.

``python -m benchmarks.push.same_host`` serves a float32 Qwen3-0.6B of random weights on two replicas, and in each round
measures, one after the other: limit A, limit T, a push through shared memory and one over TCP (both from `push()` to
committed, checksums on), and every peer. A peer moves the bytes to one receiver and checks nothing; processes of
peers are started for the round and pass once before they are timed. Ratios are taken within a round. The first push is
that of a new trainer to a service that has been up for some seconds and has never had weights.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.service import SMALL_KV, EmptyService
from benchmarks.gpu.shapes import SHAPES
from benchmarks.push import limits, source
from benchmarks.push.peers import install
from benchmarks.push.rounds import Pusher, middle
from benchmarks.push.table import markdown
from rollout_client import WeightPublisher
from weight_manager.families import manifest_for

PEERS = ("safetensors_file", "torch_gloo", "paddle_gloo", "zmq_frames", "zmq_recv_into", "verl_buckets")
WITH_TORCH = ("torch_gloo", "verl_buckets")
PASSES, PEER_S = 2, 180
console = Console(width=130)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.push.same_host", description=__doc__)
    parser.add_argument("--shapes", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated; empty leaves them out")
    parser.add_argument("--torch-python", type=Path, help="with torch, numpy and pyzmq; default: made in .venvs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/push.json"))
    args = parser.parse_args()
    peers = [peer for peer in args.peers.split(",") if peer]
    torch_python = args.torch_python
    if torch_python is None and set(peers) & set(WITH_TORCH):
        torch_python = install.python_with_torch()
    verl = install.verl() if "verl_buckets" in peers else None
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "VERL_DIR": str(verl or "")}
    shapes = {p.name: p.shape for p in manifest_for(SHAPES[args.shapes], "float32").parameters}
    with tempfile.TemporaryDirectory(prefix="bench-push-", dir="/dev/shm") as scratch:
        path = source.write(Path(scratch), shapes)
        result = {
            "model": args.shapes,
            "dtype": "float32",
            "bytes": path.stat().st_size,
            "tensors": len(shapes),
            "replicas": args.replicas,
            "machine": {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
            "limit_a": "one memmove of all bytes in one thread, shared memory to warm shared memory",
            "rounds": [],
            "failed": {},
        }
        options = (*SMALL_KV, "--dtype", "float32")
        with (
            EmptyService(SHAPES[args.shapes], args.replicas, Path(scratch) / "log", *options) as service,
            WeightPublisher(service.push_endpoint, run_id="push", transport="shm", progress=False) as near,
            WeightPublisher(service.push_endpoint, run_id="push", transport="zmq", progress=False) as far,
        ):
            service.wait_settled()
            tensors = source.read(path)[1]
            pusher = Pusher(tensors)
            result["first_push_of_all_s"] = pusher.push(near)["total"]  # nothing is live: nobody votes
            service.wait_ready()
            pusher.push(near)  # the other slot gets its memory
            pusher.push(far)
            with WeightPublisher(service.push_endpoint, run_id="push", transport="shm", progress=False) as fresh:
                result["first_push_of_a_trainer_s"] = pusher.push(fresh)["total"]
            for number in range(args.rounds):
                console.print(f"round {number + 1} of {args.rounds}, load {os.getloadavg()[0]:.1f}")
                took: dict[str, Any] = {"load": round(os.getloadavg()[0], 2)}
                took["limit_a"] = limits.copy_seconds(path)
                took["push_shm"] = pusher.push(near)
                took["limit_t"] = limits.tcp_seconds(path)
                took["push_tcp"] = pusher.push(far)
                for peer in peers:
                    python = torch_python if peer in WITH_TORCH else Path(sys.executable)
                    try:
                        took[peer] = run_peer(peer, python, path, environment)
                    except (subprocess.SubprocessError, ValueError) as error:
                        result["failed"][peer] = str(getattr(error, "stderr", "") or error)[-400:]
                result["rounds"].append(took)
                result["summary"] = summary(result)
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(result, indent=2) + "\n")
                args.out.with_suffix(".md").write_text(markdown(result))
    show(result)
    return 0


def run_peer(peer: str, python: Path, path: Path, environment: dict[str, str]) -> float:
    """Seconds of the last pass. Raises SubprocessError."""
    command = [str(python), "-m", f"benchmarks.push.peers.{peer}", str(path), str(PASSES)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PEER_S, check=True, stdin=subprocess.DEVNULL
    )
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"][-1])


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Medians over rounds of ratios taken within a round."""
    rounds = result["rounds"]
    peers = [peer for peer in PEERS if any(peer in r for r in rounds)]
    found: dict[str, Any] = {
        "seconds": {
            "limit_a": middle(r["limit_a"]["flat"] for r in rounds),
            "limit_a_by_tensor": middle(r["limit_a"]["by_tensor"] for r in rounds),
            "push_shm": middle(r["push_shm"]["total"] for r in rounds),
            "limit_t": middle(r["limit_t"] for r in rounds),
            "push_tcp": middle(r["push_tcp"]["total"] for r in rounds),
        }
        | {peer: middle(r[peer] for r in rounds if peer in r) for peer in peers},
        "limit_a_over_push": middle(r["limit_a"]["flat"] / r["push_shm"]["total"] for r in rounds),
        "limit_t_over_push": middle(r["limit_t"] / r["push_tcp"]["total"] for r in rounds),
        "first_over_warm": round(
            max(result["first_push_of_a_trainer_s"], result["first_push_of_all_s"])
            / median(r["push_shm"]["total"] for r in rounds),
            3,
        ),
        "peer_over_push": {
            peer: middle(r[peer] / r["push_shm"]["total"] for r in rounds if peer in r) for peer in peers
        },
    }
    complete = [r for r in rounds if all(peer in r for peer in peers)]
    if peers and complete:
        found["best_peer_over_push"] = middle(min(r[p] for p in peers) / r["push_shm"]["total"] for r in complete)
    return found


def show(result: dict[str, Any]) -> None:
    found = result["summary"]
    table = Table(
        "moved by", "seconds", "GB/s", "over the push", title=f"{result['model']}, {result['bytes'] / 1e9:.2f} GB"
    )
    for name, seconds in sorted(found["seconds"].items(), key=lambda item: item[1]):
        rate = result["bytes"] / seconds / 1e9 if seconds else 0.0
        ratio = found["peer_over_push"].get(name)
        table.add_row(name, f"{seconds:.3f}", f"{rate:.2f}", f"{ratio:.2f}" if ratio else "")
    console.print(table)
    console.print(
        f"limit A / push {found['limit_a_over_push']:.2f} (bar 0.60), limit T / push over TCP "
        f"{found['limit_t_over_push']:.2f} (0.90), best peer / push {found.get('best_peer_over_push', 0):.2f} (2), "
        f"first / warm {found['first_over_warm']:.2f} (1.5 at most)"
    )
    for peer, reason in result["failed"].items():
        console.print(f"{peer} failed: {reason}")


if __name__ == "__main__":
    sys.exit(main())
