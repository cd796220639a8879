"""Seconds from the command to the first token, with the checkpoint on disk and kernels and choices kept from before.

    python -m benchmarks.gpu.starts [--starts 3] [--out OUT.json]

Qwen3-0.6B's shape in bfloat16, made-up weights in one safetensors file of 1.19 GB, read before. The first start finds
nothing kept if XDG_CACHE_HOME names an empty directory. `ready_s`: until the replica serves; `token_s`: until a request
of one token is answered.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.made_up import directory
from benchmarks.gpu.report import add_out, on_gpus, report
from benchmarks.gpu.service import EmptyService
from benchmarks.gpu.shapes import SHAPES
from rollout_client import RolloutClient
from weight_manager.families import manifest_for

MODEL = "Qwen3-0.6B"
SETTINGS = (
    *("store.load_weights=true", "worker.max_batch=256", "worker.max_tokens_per_step=8192"),
    *("worker.max_model_len=2048", "worker.num_blocks=11700"),
)


def checkpoint(torch: Any, path: Path) -> Path:
    """Of random weights. Needs torch, which has bfloat16."""
    from safetensors.torch import save_file

    directory(path, MODEL)
    made = {}
    for parameter in manifest_for(SHAPES[MODEL], "bfloat16").parameters:
        norm = parameter.name.endswith("norm.weight")
        values = torch.ones(parameter.shape) if norm else torch.empty(parameter.shape).normal_(0, 0.03)
        made[parameter.name] = values.to(torch.bfloat16)
    save_file(made, path / "model.safetensors")
    return path


def start(model: Path, log: Path) -> dict[str, float]:
    """Its seconds."""
    options = on_gpus(SETTINGS)
    began = time.perf_counter()
    with EmptyService(model, 1, log, *options) as service:
        endpoints = time.perf_counter() - began
        while service.metric("rollout_replica_ready") != 1:
            time.sleep(0.02)
        ready = time.perf_counter() - began
        with RolloutClient(service.url) as client:
            client.generate(prompt_ids=[1, 2, 3], max_tokens=1)
        token = time.perf_counter() - began
    return {"endpoints_s": round(endpoints, 2), "ready_s": round(ready, 2), "token_s": round(token, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.starts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--starts", type=int, default=3)
    add_out(parser)
    args = parser.parse_args()
    import torch

    logs = Path(tempfile.mkdtemp(prefix="starts-log-"))
    with tempfile.TemporaryDirectory(prefix="starts-") as scratch:
        model = checkpoint(torch, Path(scratch) / "model")
        starts = [start(model, logs / f"{number}.log") for number in range(args.starts)]
    result = {"card": torch.cuda.get_device_name(), "starts": starts}
    report(result, args.out)


if __name__ == "__main__":
    main()
