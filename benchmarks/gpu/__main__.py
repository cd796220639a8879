"""A trainer on a GPU beside workers on the CPU of the same host: pushes against the limit, then the demo's GRPO.

``python -m benchmarks.gpu --out benchmarks/results/gpu.json`` needs torch with CUDA;
run.sh beside it installs the rest.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BAR = 0.7


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--models", default="Qwen3-0.6B,Qwen2.5-7B", help="of shapes.py, comma-separated")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--pushes", type=int, default=7, help="of each kind")
    parser.add_argument("--clients", type=int, default=16, help="requests under way at any time")
    parser.add_argument("--grpo-steps", type=int, default=250, help="0 leaves the demo out")
    parser.add_argument("--set", action="append", default=[], help="passed on to serve")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu.json"))
    parser.add_argument("--logs", type=Path, help="directory for the services' logs")
    args = parser.parse_args()
    import torch

    from benchmarks.gpu.push import measure

    logs = args.logs or Path(tempfile.mkdtemp(prefix="gpu-bench-"))
    logs.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"machine": machine(torch), "settings": args.set, "models": []}
    options = [word for each in args.set for word in ("--set", each)]
    for shape in filter(None, args.models.split(",")):
        console.print(f"{shape}: {args.replicas} replicas")
        sizes = {"replicas": args.replicas, "pushes": args.pushes, "clients": args.clients}
        result["models"].append(measure(torch, torch.device(args.device), shape, logs, **sizes, options=options))
        write(args.out, result)
        show(result["models"])
    if args.grpo_steps:
        result["grpo"] = grpo(args.device, args.grpo_steps, args.replicas, logs / "grpo")
        write(args.out, result)
        console.print_json(json.dumps(result["grpo"]))
    return 0 if all(m["same_digest_by_way_of_the_cpu"] for m in result["models"]) else 1


def machine(torch: Any) -> dict[str, Any]:
    """What these figures are true of."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu,
        "memory_gib": round(memory, 1),
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found | {"torch": torch.__version__}


def grpo(device: str, steps: int, replicas: int, out: Path) -> dict[str, Any]:
    """The demo with a torch trainer, in a process of its own; its summary."""
    command = [sys.executable, "-m", "examples.grpo_torch", "--device", device, "--steps", str(steps)]
    subprocess.run([*command, "--replicas", str(replicas), "--out", str(out)], check=True, timeout=400)
    return dict(json.loads((out / "summary.json").read_text()))


def show(models: list[dict[str, Any]]) -> None:
    table = Table(
        "model",
        "GB",
        "limit GB/s",
        "limit ms",
        "replicas",
        "checked ms",
        "committed ms",
        "limit/checked",
        f"limit/committed (bar {BAR})",
    )
    for m in models:
        for kind in ("idle_replicas", "generating_replicas"):
            s = m[kind]
            table.add_row(
                *(m["model"], f"{m['bytes'] / 1e9:.2f}", str(m["limit_gb_per_s"]), str(m["limit_ms"])),
                *(
                    f"{m['replicas']} {kind.split('_')[0]}",
                    str(s["median_ms"]["checked"]),
                    str(s["median_ms"]["total"]),
                ),
                *(f"{s['limit_over_checked']:.2f}", f"{s['limit_over_committed']:.2f}"),
            )
    console.print(table)


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


console = Console(width=150)

if __name__ == "__main__":
    sys.exit(main())
