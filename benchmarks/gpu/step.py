"""A decode step of Qwen3-0.6B's shape by itself, against what the card's memory allows.

    python -m benchmarks.gpu.step [--batch 1 16 64 256] [--context 516] [--out OUT.json]

The limit is the bytes of all weights and of every sequence's keys and values, each read once, over the card's
bandwidth: its own, measured here by copies of 4 GiB (bytes read and written), and 3.0 TB/s, an H100's. Steps are a
captured graph each, up to the logits, timed by the device one after the other; the weights are made up. Needs torch for
the copies.
"""

import argparse
import json
import math
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.made_up import directory
from benchmarks.gpu.shapes import SHAPES
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout, rank_views
from worker.config import WorkerConfig
from worker.engine.base import ForwardBatch
from worker.gpu.engine import GpuEngine

MODEL = "Qwen3-0.6B"
H100 = 3.0e12
"""Bytes a second."""
COPIED = 4 << 30
BLOCK = 16
WARM, STEPS = 10, 60


def made_up_engine(scratch: Path, most: int, context: int) -> GpuEngine:
    """With weights bound: values that keep every layer's output about as large as its input."""
    blocks = most * (-(-context // BLOCK) + 1)
    config = WorkerConfig(
        model_dir=directory(scratch / "model"),
        dtype="bfloat16",
        device="gpu",
        max_batch=most,
        max_model_len=2048,
        max_tokens_per_step=max(1024, most),
        num_blocks=blocks,
    )
    layout = make_layout(manifest_for(SHAPES[MODEL], "bfloat16"), 1)
    engine = GpuEngine(config, layout, 0, 0)
    engine.allocate_kv()
    pool = np.random.default_rng(0).standard_normal(1_000_003, dtype=np.float32) * np.float32(0.03)
    slot = np.resize((pool.view(np.uint32) >> 16).astype(np.uint16), layout.slot_bytes // 2)
    engine.bind(engine.prepare(rank_views(layout, 0, memoryview(slot.view(np.uint8)).toreadonly())))
    return engine


def bandwidth(torch: Any) -> float:
    """Bytes a second that copies within the card read and write; the best of some."""
    source = torch.randint(0, 256, (COPIED,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    del source, target
    torch.cuda.empty_cache()
    return 2 * COPIED / best * 1e3


def decode_batch(count: int, context: int) -> ForwardBatch:
    """The context's last token of so many sequences, whose blocks are anywhere."""
    each = -(-context // BLOCK)
    tables = np.random.default_rng(0).permutation(count * each).reshape(count, each).astype(np.int32)
    position = np.full(count, context - 1, np.int32)
    return ForwardBatch(
        token_ids=np.arange(count, dtype=np.int32) * 7 + 1000,
        positions=position,
        slots=(tables[:, -1] * BLOCK + (context - 1) % BLOCK).astype(np.int32),
        query_lens=np.ones(count, np.int32),
        context_lens=position + 1,
        block_tables=tables,
        logits_rows=np.arange(count, dtype=np.int32),
        block_copies=np.zeros((0, 2), np.int32),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=516)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import torch

    own = bandwidth(torch)
    result: dict[str, Any] = {"card": torch.cuda.get_device_name(), "bandwidth": round(own / 1e12, 3)}
    with tempfile.TemporaryDirectory() as scratch:
        engine = made_up_engine(Path(scratch), max(args.batch), args.context)
    for count in args.batch:
        times = step_ms(engine, decode_batch(count, args.context))
        whole, moved = statistics.median(times), moved_bytes(count, args.context)
        result[str(count)] = {
            "ms": round(whole, 4),
            "best_ms": round(min(times), 4),
            "tokens_per_s": round(count / whole * 1e3),
            "of_own_limit": round(moved / own * 1e3 / whole, 3),
            "of_h100_limit": round(moved / H100 * 1e3 / whole, 3),
        }
        print(count, result[str(count)], flush=True)
    print(json.dumps(result))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def step_ms(engine: GpuEngine, batch: ForwardBatch) -> list[float]:
    """Of each step. Reaches into the engine: a benchmark may."""
    decoder = engine._decoder
    driver, stream = decoder._driver, decoder._stream
    marks = [driver.event(timing=True) for _ in range(STEPS + 1)]
    for _ in range(WARM):
        decoder.decode(batch)
    driver.record(marks[0], stream)
    for mark in marks[1:]:
        decoder.decode(batch)
        driver.record(mark, stream)
    return [driver.milliseconds(start, end) for start, end in pairwise(marks)]


def moved_bytes(count: int, context: int) -> int:
    """All weights once (the head is the embedding), and all keys and values."""
    shape = SHAPES[MODEL]
    weights = sum(2 * math.prod(p.shape) for p in manifest_for(shape, "bfloat16").parameters)
    kept = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return weights + count * context * kept


if __name__ == "__main__":
    main()
