"""What the signals of a tick add to a step at tp 2: agree, the ranks' vote on the step before, and the shared batch.

    python -m benchmarks.generate.signals [--dtype float32] [--rounds 5]

Two ranks decode 16 sequences at a context of 128 to 248 on one thread each. Steps with a tick's signals alternate with
steps whose batch both ranks know already; added is the difference of the medians over the plain step. Calls are the
seconds that rank 0 spends in the signals themselves, waiting for the other rank included.

On two cores that four busy threads share a step's time spreads by 15 %. Of 60 steps of each kind, two of the same kind
differed by up to 3 %; so there are 300, whose medians are known to about 1 %.
"""

import json
import os
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.generate.rounds import Round, Section, arguments
from benchmarks.ranks import said_by_ranks

SIZE, COUNT, CONTEXT, STEPS = 2, 16, 128, 300
GROWN = 120
"""Tokens by which the context grows before it begins again."""
RANK = "PADDLE_TRAINER_ID"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rank", action="store_true", help="be one of the ranks")
    args = parser.parse_args()
    if args.rank:
        found = measure(args.model, args.dtype, int(os.environ[RANK]))
        if found:
            print(json.dumps(found), flush=True)
        os._exit(0)  # tearing Paddle down takes seconds
    Section(args.out, f"signals/{args.dtype}", args.rounds, args.budget).collect(
        lambda _: spawned(args.model, args.dtype)
    )


def spawned(model: Path, dtype: str) -> Round:
    command = [sys.executable, "-m", "benchmarks.generate.signals", "--rank", "--model", str(model), "--dtype", dtype]
    said = said_by_ranks(command, SIZE, timeout_s=200)
    result: Round = json.loads(said[0].strip().splitlines()[-1])
    return result


def measure(model: Path, dtype: str, rank: int) -> Round | None:
    from worker.cpu.tuning import tune

    tune(1, SIZE)
    from benchmarks.decode_profile import loaded, step
    from worker import shared_sums
    from worker.engine.base import ForwardBatch
    from worker.gloo_signals import GlooSignals
    from worker.orders import Order
    from worker.process_groups import join

    joined = join(rank, SIZE, deadline_s=60)
    signals = GlooSignals(joined.signal, rank, SIZE)
    sums = shared_sums.meet(rank, signals.pids, signals.gather) or joined.sums
    engine = loaded(model, dtype, [], rank=rank, tp=SIZE, sums=sums)
    width = -(-(CONTEXT + GROWN) // engine.spec.block_size) + 1
    tables = np.arange(COUNT * width, dtype=np.int32).reshape(COUNT, width)
    times: dict[bool, list[float]] = {True: [], False: []}
    calls: list[float] = []
    for i in range(2 * STEPS):
        batch = step(engine, COUNT, CONTEXT + i % GROWN, tables)
        signals.vote((0, 0))  # both ranks begin together
        began = time.perf_counter()
        if i % 2:
            signals.agree(Order(vote=True, step=True) if rank == 0 else None)
            signals.vote((0, 0))
            packed = signals.share(batch.pack() if rank == 0 else None)
            assert packed is not None
            batch = batch if rank == 0 else ForwardBatch.unpack(packed)
            calls.append(time.perf_counter() - began)
        engine.forward(batch)
        times[bool(i % 2)].append(time.perf_counter() - began)
    plain, whole = median(times[False][5:]), median(times[True][5:])
    if rank:
        return None
    return {
        "plain_ms": round(plain * 1e3, 3),
        "with_signals_ms": round(whole * 1e3, 3),
        "calls_ms": round(median(calls) * 1e3, 3),
        "added": round(whole / plain - 1, 4),
        "calls_share": round(median(calls) / plain, 4),
    }


if __name__ == "__main__":
    main()
