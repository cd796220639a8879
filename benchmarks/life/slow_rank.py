"""A signal group of three ranks, one of which is slow at every tick: agreement, and what waiting costs the others."""

import json
import os
import sys
from typing import Any

from benchmarks.ranks import said_by_ranks

RANKS, TICKS, SLOW_S = 3, 5, 2.0
_RANK = f"""
import json, os, time
from worker.gloo_signals import GlooSignals
from worker.process_groups import join
from worker.orders import Order, Signal
rank, size = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
signals = GlooSignals(join(rank, size, deadline_s=30).signal, rank, size)
signals.vote((0, 0))
began, cpu, seen = time.monotonic(), time.process_time(), []
for tick in range({TICKS}):
    if rank == size - 1:
        time.sleep({SLOW_S})
    order = signals.agree(Order(Signal.PAUSE if tick % 2 else Signal.RUN, vote=True) if rank == 0 else None)
    seen.append([order.signal.name, signals.vote((rank, tick))])
print(json.dumps([seen, time.monotonic() - began, time.process_time() - cpu]), flush=True)
signals.vote((0, 0))
os._exit(0)
"""


def slow_rank() -> dict[str, Any]:
    """agreed: every rank saw the same orders and the same votes at every tick."""
    command = [sys.executable, "-c", _RANK]
    said = [json.loads(text) for text in said_by_ranks(command, RANKS, timeout_s=120, env={"OMP_NUM_THREADS": "1"})]
    expected = [["PAUSE" if tick % 2 else "RUN", [[rank, tick] for rank in range(RANKS)]] for tick in range(TICKS)]
    return {
        "ticks": TICKS,
        "slow_s": SLOW_S,
        "agreed": all(seen == expected for seen, _, _ in said),
        "seconds": [round(seconds, 2) for _, seconds, _ in said],
        "core_percent": [round(100 * cpu / seconds, 2) for _, seconds, cpu in said],
        "load": os.getloadavg()[0],
    }
