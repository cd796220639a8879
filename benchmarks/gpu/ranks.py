"""A decode step of ranks that share a model on the GPUs of a host, and its sums alone.

    python -m benchmarks.gpu.ranks [--shape Qwen3-0.6B] [--tp 2] [--sequences 1,16,64,256] [--out OUT.json]

Each rank is a process with the engine of a service, self-tests and all; they meet through this one. Random weights in
bfloat16. A step is its graph, replayed; `sums` are as many all-reduces of the residual stream as a step has, in one;
`nccl` the same where all are NCCL's.
"""

import argparse
import json
import logging
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.report import add_out, report
from benchmarks.gpu.shapes import SHAPES
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout
from worker.config import WorkerConfig
from worker.engine.base import ForwardBatch
from worker.gpu.driver import Handle
from worker.gpu.engine import GpuEngine
from worker.gpu.ranks import Meeting, Ranks

BLOCK, POOL = 16, 1 << 24
ROUNDS, REPLAYS = 7, 10


def run_rank(rank: int, end: Connection, folder: str, tp: int, sequences: list[int], context: int) -> None:
    """One rank: sends what it wants gathered, and at last what it found."""
    logging.basicConfig(level=logging.INFO)

    def gather(mine: bytes) -> list[bytes]:
        end.send(mine)
        found: list[bytes] = end.recv()
        return found

    pids = [int(data) for data in gather(str(os.getpid()).encode())]
    config = json.loads((Path(folder) / "config.json").read_text())
    most, blocks = max(sequences), -(-context // BLOCK)
    settings = WorkerConfig(
        model_dir=Path(folder), dtype="bfloat16", device="gpu", tp=tp, max_batch=most, block_size=BLOCK,
        max_model_len=context + BLOCK, num_blocks=most * blocks + 1,
    )  # fmt: skip
    layout = make_layout(manifest_for(config, "bfloat16"), tp)
    engine = GpuEngine(settings, layout, 0, rank, meeting=Meeting(gather, pids, 60.0) if tp > 1 else None)
    decoder, driver = engine._decoder, engine._driver
    engine.allocate_kv()
    pool = np.random.default_rng(0).standard_normal(POOL, dtype=np.float32)
    small = ((pool * np.float32(0.03)).view(np.uint32) >> 16).astype(np.uint16)
    for name, tensor in decoder.tensors(0).items():
        count = int(np.prod(tensor.shape))
        values = np.full(count, 0x3F80, np.uint16) if name.endswith("norm.weight") else np.resize(small, count)
        decoder.put(tensor.address, values)
    engine._slots.bound = 0
    stream = decoder._stream

    def milliseconds(graph: Handle) -> float:
        times = []
        for _ in range(ROUNDS + 1):
            gather(b"")  # all begin together
            start, stop = driver.event(timing=True), driver.event(timing=True)
            driver.record(start, stream)
            for _ in range(REPLAYS):
                driver.launch(graph, stream)
            driver.record(stop, stream)
            if decoder.ranks is not None:
                decoder.ranks.groups.launched(stream)
            times.append(driver.milliseconds(start, stop) / REPLAYS)
        return statistics.median(times[1:])

    rows = []
    for size in sequences:
        at = decoder._size(size)
        decoder.forward(batch(size, blocks, context, config["vocab_size"]))
        decoder.wait()
        row: dict[str, Any] = {"sequences": size, "step_ms": round(milliseconds(decoder.graph(0, at)), 4)}
        ranks = decoder.ranks
        if ranks is not None:
            count, sums = at * config["hidden_size"], 2 * config["num_hidden_layers"] + 1
            place = decoder._buffers.residual

            for name, way in (("sums_ms", ranks), ("nccl_ms", replace(ranks, peers=None))):

                def summed(ranks: Ranks = way, count: int = count, sums: int = sums, place: int = place) -> None:
                    for _ in range(sums):
                        ranks.sum(place, count, stream)

                driver.fill(place, 4 * count, 0, stream)  # or it grows without bounds
                with ranks.groups.under_way():
                    graph = driver.captured(stream, summed)
                row |= {name: round(milliseconds(graph), 4), "sums": sums}
                driver.drop(graph)
        rows.append(row)
    end.send({"rank": rank, "card": driver.name, "rows": rows})


def batch(rows: int, blocks: int, context: int, vocab: int) -> ForwardBatch:
    """One token for each of so many sequences, the last of `context`. The same on every rank."""
    rng = np.random.default_rng(rows)
    tables = (rng.permutation(rows * blocks) + 1).astype(np.int32).reshape(rows, blocks)
    last = context - 1
    return ForwardBatch(
        token_ids=rng.integers(0, vocab, rows).astype(np.int32),
        positions=np.full(rows, last, np.int32),
        slots=(tables[:, last // BLOCK] * BLOCK + last % BLOCK).astype(np.int32),
        query_lens=np.ones(rows, np.int32),
        context_lens=np.full(rows, context, np.int32),
        block_tables=tables,
        logits_rows=np.arange(rows, dtype=np.int32),
        block_copies=np.zeros((0, 2), np.int32),
    )


def meeting(tp: int, target: Callable[..., None], *args: Any, patience_s: float = 20) -> dict[str, Any]:
    """What rank 0 reports of `target(rank, end, *args)`, a process for each rank. They meet through this one: what all
    of them send is sent to each, until it is a report. Raises EOFError where a rank ends, which has said why.
    """
    context = get_context("spawn")
    pipes = [context.Pipe() for _ in range(tp)]
    ranks = [context.Process(target=target, args=(rank, pipe[1], *args)) for rank, pipe in enumerate(pipes)]
    for process in ranks:
        process.start()
    for _, far in pipes:
        far.close()
    try:
        while True:
            said = [near.recv() for near, _ in pipes]
            if isinstance(said[0], dict):
                first: dict[str, Any] = said[0]
                return first
            for near, _ in pipes:
                near.send(said)
    finally:
        for process in ranks:
            process.join(patience_s)
            process.kill()


def measured(shape: str, tp: int, sequences: list[int], context: int) -> dict[str, Any]:
    """Rank 0's report."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        first = meeting(tp, run_rank, folder, tp, sequences, context)
    return {"shape": shape, "tp": tp, "context": context, **first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen3-0.6B", choices=sorted(SHAPES))
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--sequences", default="1,16,64,256")
    parser.add_argument("--context", type=int, default=516)
    add_out(parser)
    args = parser.parse_args()
    found = measured(args.shape, args.tp, [int(n) for n in args.sequences.split(",")], args.context)
    report(found, args.out)


if __name__ == "__main__":
    main()
