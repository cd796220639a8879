"""Decode steps of one engine, timed on request. A process of its own, of whichever tree is on PYTHONPATH.

Line in:  {"count": sequences, "steps": how many}
Line out: {"seconds": median of a step, "processor_seconds": the least of one, of all threads}
"""

import argparse
import functools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

CONTEXT, BLOCKS = 128, 256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--settings", type=json.loads, default={})
    args = parser.parse_args()
    from worker.cpu.tuning import tune

    tune(None, 1)
    engine = engine_of(args.model, args.dtype, **args.settings)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        seconds, processor = timed(engine, job["count"], job["steps"])
        print(json.dumps({"seconds": seconds, "processor_seconds": processor}), flush=True)


def engine_of(model: Path, dtype: str, **settings: Any) -> Any:
    """Weights in huge pages as in a service, a small KV cache. settings: of WorkerConfig."""
    import worker.config
    from benchmarks.decode_profile import loaded

    whole = worker.config.WorkerConfig
    worker.config.WorkerConfig = functools.partial(whole, num_blocks=BLOCKS, **settings)
    try:
        return loaded(model, dtype, [])
    finally:
        worker.config.WorkerConfig = whole


def timed(engine: Any, count: int, steps: int) -> tuple[float, float]:
    """Seconds of a step of so many sequences: the median, and the processor's least."""
    from benchmarks.decode_profile import step

    columns = -(-2 * CONTEXT // engine.spec.block_size)
    tables = np.arange(count * columns, dtype=np.int32).reshape(count, columns) % BLOCKS
    batch = step(engine, count, CONTEXT, tables)
    engine.forward(batch)
    took, worked = [], []
    for _ in range(steps):
        began, before = time.perf_counter(), time.process_time()
        engine.forward(batch)
        took.append(time.perf_counter() - began)
        worked.append(time.process_time() - before)
    return statistics.median(took), min(worked)


if __name__ == "__main__":
    main()
