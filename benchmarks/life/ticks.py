"""What a tick costs: the loop's parts on one rank, the signal group's calls on several, and what idling costs."""

import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.ranks import said_by_ranks
from tests.unit.worker.loop.rig import Rig
from worker.event_loop import EventLoop

PARTS = ("receive", "agree", "act", "schedule", "step", "reply")
IDLE_S = 10.0
_RANK = """
import json, os, sys, time
import numpy as np
from benchmarks.life.ticks import IDLE_S, threads_of
from worker.gloo_signals import GlooSignals
from worker.process_groups import join
from worker.orders import Order, Phase, Signal
from weight_manager.messages import Live
rank, size = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
signals = GlooSignals(join(rank, size, deadline_s=30).signal, rank, size)
live = Live("run", 7, 3, 1, "ab" * 16, 9)
prepare = Order(Signal.UPDATE, Phase.PREPARE, session="s", live=live, vote=True)
small, large = np.zeros(300, np.int32), np.zeros(20000, np.int32)
calls = {
    "agree, nothing to tell": lambda: signals.agree(Order() if rank == 0 else None),
    "agree, with details": lambda: signals.agree(prepare if rank == 0 else None),
    "share a batch of 300 numbers": lambda: signals.share(small if rank == 0 else None),
    "share a batch of 20000 numbers": lambda: signals.share(large if rank == 0 else None),
    "vote": lambda: signals.vote((1, 1)),
    "gather a few words": lambda: signals.gather(b"a few words of a rank"),
}
result = {}
for name, call in calls.items():
    for _ in range(50):
        call()
    signals.vote((0, 0))
    times, cpu = [], time.process_time()
    for _ in range(500):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
        signals.vote((0, 0))  # so that rank 0 does not run ahead of the others
    times.sort()
    result[name] = [times[len(times) // 2] * 1e6, times[len(times) * 99 // 100] * 1e6]
signals.vote((0, 0))
before, cpu = threads_of(os.getpid()), time.process_time()
time.sleep(IDLE_S)
idle = {"cpu_share": (time.process_time() - cpu) / IDLE_S, "wakeups_per_s": (threads_of(os.getpid()) - before) / IDLE_S}
print(json.dumps({"calls": result, "idle": idle}), flush=True)
signals.vote((0, 0))
os._exit(0)
"""


def threads_of(pid: int) -> int:
    """How often the threads of a process have gone to sleep so far."""
    count = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                count += int(line.split()[1])
    return count


def loop_parts(requests: int, tokens: int = 300) -> dict[str, float]:
    """Microseconds of processor time of a tick by part, on one rank whose engine does nothing; medians over ticks.

    step is the fake engine, which draws its logits at random, and the sampler.
    """
    spent: dict[str, list[float]] = defaultdict(list)
    before = {name: getattr(EventLoop, name) for name in (*PARTS, "tick")}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args)
            finally:
                spent[name].append(time.thread_time() - began)

        return run

    for name, call in before.items():
        setattr(EventLoop, name, timed(name, call))
    rig = Rig(max_batch=64, num_blocks=64 * 80)
    try:
        rig.serve()
        for parts in spent.values():
            parts.clear()
        for number in range(requests):
            rig.api.generate(f"r{number}", max_tokens=tokens)
        for number in range(requests):
            rig.api.finish(f"r{number}", 120)
    finally:
        rig.stop()
        for name, call in before.items():
            setattr(EventLoop, name, call)
    return {name: round(statistics.median(spent[name]) * 1e6, 1) for name in (*PARTS, "tick")}


def signal_group(size: int) -> dict[str, Any]:
    """Median and 99th percentile in microseconds of each call, of the slowest rank; and what an idle rank costs."""
    command = [sys.executable, "-c", _RANK]
    said = [json.loads(text) for text in said_by_ranks(command, size, timeout_s=120, env={"OMP_NUM_THREADS": "1"})]
    calls = {
        name: {
            "median_us": round(max(one["calls"][name][0] for one in said), 1),
            "p99_us": round(max(one["calls"][name][1] for one in said), 1),
        }
        for name in said[0]["calls"]
    }
    idle = {key: round(max(one["idle"][key] for one in said), 4) for key in said[0]["idle"]}
    return {"calls": calls, "idle": idle}


def ticks() -> dict[str, Any]:
    """All of it."""
    return {
        "microseconds_of_a_tick_without_a_model": {f"{n} streams": loop_parts(n) for n in (1, 16, 64)},
        **{f"signal_group_of_{size}": signal_group(size) for size in (2, 3)},
    }
