"""Where a decode step's time goes: milliseconds by part, at 1, 16 and 64 sequences, in both dtypes.

    python -m benchmarks.decode_profile [--model DIR] [--context 128] [--batch 1 16 64] [--dtype float32 bfloat16]
                                        [--adapters 0 1 8] [--threads N]

Sequences decode in lock step from `context` tokens on. A part's time is measured around every recorded call
of one step in a second pass, so the parts sum to a little more than the step. Step times are medians.
adapters: how many random ones of rank 16, of all linears, the sequences have in turn. Each number has its step in turn,
and its time and processor time are also given over those of the step before without any: with one thread, the second is
true on a machine that does other work as well.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from worker.cpu.tuning import tune

MODEL = Path("models/SmolLM2-135M-Instruct")
RANK, BLOCK = 16, 16
"""Of adapters; tokens of a KV block, at the least."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--without", nargs="*", default=[], choices=["onednn", "compiler"], help="do as if it were not there"
    )
    args = parser.parse_args()
    tune(args.threads, 1)
    for dtype in args.dtype:
        blocks = max(args.batch) * (-(-(args.context + args.steps) // BLOCK) + 1)
        engine = loaded(args.model, dtype, args.without, num_blocks=blocks)
        hold_adapters(engine, max(args.adapters))
        for count in args.batch:
            measure(engine, dtype, count, args.context, args.steps, args.adapters)


def loaded(
    path: Path,
    dtype: Any,
    without: list[str],
    *,
    rank: int = 0,
    tp: int = 1,
    sums: Any = None,
    rounded: bool = False,
    num_blocks: int | None = None,
) -> Any:
    """Weights in huge pages, as in a service. rounded: a float32 engine with weights that bfloat16 can hold.

    num_blocks: of the KV cache; None = what a service would make.
    """
    from safetensors.numpy import load_file

    from rollout_client.aligned_map import collapse
    from rollout_client.copying import cast
    from weight_manager.families import manifest_for
    from weight_manager.layout import make_layout, rank_views, region_views
    from worker.config import WorkerConfig
    from worker.cpu import native
    from worker.engine import paddle_engine
    from worker.models.filled_memory import wait_until_filled

    if "onednn" in without:
        paddle_engine.why_not = lambda dtype: "asked for"
    if "compiler" in without:
        native.compiled = refuse
    manifest = manifest_for(json.loads((path / "config.json").read_text()), dtype)
    layout = make_layout(manifest, tp)
    tensors = load_file(path / "model.safetensors")
    slot = memory(layout.slot_bytes)
    for region, view in zip(layout.regions, region_views(layout, slot), strict=True):
        box = tuple(slice(start, start + size) for start, size in zip(region.start, region.shape, strict=True))
        flat = np.ascontiguousarray(tensors[region.name][box]).reshape(-1)
        if dtype == "bfloat16":
            cast("float32", "bfloat16", flat, view)
        elif rounded:
            narrow = np.empty(flat.size, np.uint16)
            cast("float32", "bfloat16", flat, narrow)
            cast("bfloat16", "float32", narrow, view)
        else:
            view[:] = flat
    config = WorkerConfig(model_dir=path, dtype=dtype, tp=tp, max_batch=64, max_model_len=1024, num_blocks=num_blocks)
    engine = paddle_engine.PaddleEngine(config, manifest, sums, rank)
    engine.allocate_kv()
    wait_until_filled(120)
    if not collapse(slot):
        print("no huge pages for the weights: a service is faster where it gets some", file=sys.stderr)
    engine.bind(engine.prepare(rank_views(layout, rank, slot.toreadonly())))
    return engine


def memory(nbytes: int) -> memoryview:
    """As the store makes it for a slot."""
    from rollout_client.aligned_map import map_aligned

    fd = os.memfd_create("slot")
    try:
        os.ftruncate(fd, nbytes)
        return map_aligned(fd, nbytes, 0, write=True)
    finally:
        os.close(fd)


def refuse() -> Path:
    raise OSError("asked for")


def hold_adapters(engine: Any, count: int) -> None:
    """Epochs 1, 2, ...: random float32 adapters of every linear that may have one. Reaches into the engine."""
    from weight_manager.adapters.plan import AdapterModule
    from weight_manager.layout import Extent

    modules, spans, end = [], {}, 0
    for module, (inputs, rows) in engine.adapters._shapes.items():
        modules.append(AdapterModule(module, RANK, 2.0))
        for half, shape in (("lora_A", (RANK, inputs)), ("lora_B", (rows, RANK))):
            spans[f"{module}.{half}"], end = Extent(end, shape), end + shape[0] * shape[1]
    for epoch in range(1, count + 1):
        plan = engine.adapters.plan(f"adapter-{epoch}", spans, modules, "float32")
        numbers = np.random.default_rng(epoch).standard_normal(end, np.float32)
        engine.adapters.hold(epoch, plan, np.float32(0.01) * numbers)


def step(engine: Any, count: int, context: int, tables: np.ndarray, adapters: int = 0) -> Any:
    from worker.engine.base import NO_ADAPTERS, ForwardBatch

    size = engine.spec.block_size
    position = np.full(count, context - 1, np.int32)
    return ForwardBatch(
        token_ids=np.arange(count, dtype=np.int32) % 1000 + 7,
        positions=position,
        slots=(tables[:, (context - 1) // size] * size + (context - 1) % size).astype(np.int32),
        query_lens=np.ones(count, np.int32),
        context_lens=position + 1,
        block_tables=tables,
        logits_rows=np.arange(count, dtype=np.int32),
        block_copies=np.zeros((0, 2), np.int32),
        adapters=np.arange(count, dtype=np.int32) % adapters + 1 if adapters else NO_ADAPTERS,
    )


def measure(engine: Any, dtype: str, count: int, context: int, steps: int, adapters: list[int]) -> None:
    size = engine.spec.block_size
    blocks = np.random.default_rng(0).permutation(count * (-(-(context + steps) // size) + 1))
    tables = blocks.reshape(count, -1).astype(np.int32)
    seconds: dict[int, list[float]] = {number: [] for number in adapters}
    cpu: dict[int, list[float]] = {number: [] for number in adapters}
    for i in range(steps):
        for number in adapters:
            batch = step(engine, count, context + i, tables, number)
            start, used = time.perf_counter(), time.process_time()
            engine.forward(batch)
            seconds[number].append(time.perf_counter() - start)
            cpu[number].append(time.process_time() - used)
    for number in adapters:
        times, used_of_all = seconds[number][2:], cpu[number][2:]
        whole = statistics.median(times)
        said = f"{dtype} x {count}" + (f", {number} adapters" if number else "")
        print(
            f"{said}: {whole * 1e3:.2f} ms a step (best {min(times) * 1e3:.2f}, cpu "
            f"{statistics.median(used_of_all) * 1e3:.2f}), {count / whole:.0f} tokens/s"
        )
        if number and 0 in adapters:
            over = [
                statistics.median(base / taken for base, taken in zip(of[0][2:], of[number][2:], strict=True))
                for of in (seconds, cpu)
            ]
            print(f"    {over[0]:.3f} of the base's speed, {over[1]:.3f} by processor time")
        for part, took in parts(engine, step(engine, count, context + steps, tables, number)).most_common():
            print(f"    {took * 1e3:8.2f} ms  {part}")


def parts(engine: Any, batch: Any) -> Counter[str]:
    """Best of five steps, call by call. Reaches into the backend: a benchmark may."""
    backend = engine._backend
    if not hasattr(backend, "_programs"):
        return Counter()
    spent: list[Counter[str]] = []
    body, head = (
        backend._programs[*backend.form(len(batch.token_ids)), bool(batch.adapters.any())][0],
        backend._heads[backend.form(len(batch.logits_rows))][0],
    )
    recorded = body._steps, head._steps
    for _ in range(5):
        counts: Counter[str] = Counter()
        body._steps = [timed(call, name(backend, call), counts) for call in recorded[0]]
        head._steps = [timed(call, "head " + name(backend, call), counts) for call in recorded[1]]
        start = time.perf_counter()
        engine.forward(batch)
        counts["before and between: look-up, tables, indexing"] = time.perf_counter() - start - counts.total()
        spent.append(counts)
    body._steps, head._steps = recorded
    return min(spent, key=Counter.total)


def name(backend: Any, call: Any) -> str:
    if not hasattr(call, "kept"):
        return getattr(call, "__qualname__", "").partition(".<locals>")[0]
    slot = next((o for o in call.kept[3].values() if hasattr(o, "name")), None)
    kernel = backend._dnn.implementation(call)
    if "matmul" in kernel or "gemm" in kernel:
        return "product " + (".".join(slot.name.split(".")[3:5]) + str(slot.shape) if slot else "mean of squares")
    return f"element-wise {kernel}"


def timed(call: Any, label: str, counts: Counter[str]) -> Any:
    def run() -> object:
        start = time.perf_counter()
        result = call()
        counts[label] += time.perf_counter() - start
        return result

    return run


if __name__ == "__main__":
    main()
