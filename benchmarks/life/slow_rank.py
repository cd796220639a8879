"""A signal group of three ranks, one of which is slow at every tick: agreement, and what waiting costs the others."""

import json
import os
import subprocess
import sys
from typing import Any

from worker.rendezvous import group_environment, ports_needed
from worker.service import free_ports

RANKS, TICKS, SLOW_S = 3, 5, 2.0
_RANK = f"""
import json, os, time
from worker.gloo_signals import GlooSignals
from worker.process_groups import join
from worker.signals import Order, Signal
rank, size = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
signals = GlooSignals(join(rank, size, tp_backend="gloo", deadline_s=30).signal, rank, size)
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
    ports = free_ports(ports_needed(RANKS))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK],
            env={**os.environ, **group_environment(rank, ports), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    expected = [["PAUSE" if tick % 2 else "RUN", [[rank, tick] for rank in range(RANKS)]] for tick in range(TICKS)]
    return {
        "ticks": TICKS,
        "slow_s": SLOW_S,
        "agreed": all(seen == expected for seen, _, _ in said),
        "seconds": [round(seconds, 2) for _, seconds, _ in said],
        "core_percent": [round(100 * cpu / seconds, 2) for _, seconds, cpu in said],
        "load": os.getloadavg()[0],
    }
