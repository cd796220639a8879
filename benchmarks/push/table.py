"""The result as a Markdown table: ``python -m benchmarks.push.table benchmarks/results/push.json``."""

import json
import sys
from pathlib import Path
from typing import Any

LABELS = {
    "limit_a": "limit A: one memmove into warm shared memory",
    "push_shm": "**push, shared memory, committed on all replicas, checksums on**",
    "limit_t": "limit T: TCP socket, `recv_into`",
    "push_tcp": "**push, TCP loopback, committed on all replicas, checksums on**",
    "safetensors_file": "safetensors through /dev/shm",
    "torch_gloo": "torch gloo broadcast",
    "paddle_gloo": "Paddle gloo broadcast",
    "zmq_frames": "pyzmq multipart over ipc",
    "zmq_recv_into": "pyzmq `recv_into` over TCP",
    "verl_buckets": "verl 0.9.1, shared memory",
}


def markdown(result: dict[str, Any]) -> str:
    """Median seconds and ratios, and what they are true of."""
    found, rounds = result["summary"], result["rounds"]
    loads = sorted(r["load"] for r in rounds)
    cores = result["machine"]["cores"]
    lines = [
        f"{result['model']} shapes, {result['dtype']}, {result['tensors']} tensors, {result['bytes'] / 1e9:.2f} GB, "
        f"{result['replicas']} replicas, {cores} cores; {len(rounds)} round(s), load average when they began "
        f"{loads[0]:.0f} to {loads[-1]:.0f}.",
        "",
        "| moved by | seconds | time over the push through shared memory |",
        "|---|---|---|",
    ]
    push = found["seconds"]["push_shm"]
    for name, label in LABELS.items():
        if name in found["seconds"]:
            seconds = found["seconds"][name]
            ratio = found["peer_over_push"].get(name, seconds / push)
            lines.append(f"| {label} | {seconds:.2f} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown(json.loads(Path(sys.argv[1]).read_text())))
