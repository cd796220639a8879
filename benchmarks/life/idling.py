"""A service that nobody asks for a while: what it uses, and how soon it answers afterwards."""

import contextlib
import os
import signal
import statistics
import time
from collections import Counter
from typing import Any

from benchmarks.life.ticks import threads_of
from rollout_client.errors import RolloutError
from tests.chaos.service import Handle, by_name
from tests.integration.live import LiveService

ASKED = {"prompt_ids": [1, 2, 3], "max_tokens": 1, "ignore_eos": True}


def first_request(live: LiveService, idle_s: float, rounds: int) -> dict[str, Any]:
    """Milliseconds of a request of one token after `idle_s` of nothing, against the same while warm (its step)."""
    with live.client() as client:
        warm = [_ask(client) for _ in range(50)]
        cold = []
        for _ in range(rounds):
            time.sleep(idle_s)
            cold.append(_ask(client))
            _ask(client)
    step = statistics.median(warm)
    return {
        "idle_s": idle_s,
        "warm_ms": round(step * 1e3, 2),
        "after_idle_ms": [round(seconds * 1e3, 2) for seconds in cold],
        "over_a_step_ms": round((max(cold) - step) * 1e3, 2),
        "load": os.getloadavg()[0],
    }


def idle(live: LiveService, seconds: float) -> dict[str, Any]:
    """Shares of a core and wake-ups of each process over `seconds`, and whether the same ranks answer afterwards."""
    with live.client() as client:
        _ask(client)
        time.sleep(15.0)  # the spare process is made
        pids = {name: pid for name, (pid, *_) in by_name(live).items()}
        before = {name: (_cpu(pid), threads_of(pid)) for name, pid in pids.items()}
        began = time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - began
        used = {
            name: {
                "core_percent": round(100 * (_cpu(pid) - before[name][0]) / took, 2),
                "wakeups_per_s": round((threads_of(pid) - before[name][1]) / took, 1),
            }
            for name, pid in pids.items()
        }
        answered = _ask(client)
    return {
        "seconds": round(took, 1),
        "processes": used,
        "same_processes": {name: pid for name, (pid, *_) in by_name(live).items()} == pids,
        "answer_ms": round(answered * 1e3, 2),
        "said_timeout": "TIMEOUT" in live.log.read_text(errors="replace").upper().replace("_TIMEOUT", ""),
        "load": os.getloadavg()[0],
    }


def overrun(live: LiveService, busy: bool) -> dict[str, Any]:
    """One of two ranks stands still for good, within a step or while idle: when the replica serves again without it.

    gloo gives up after 30 s; what is on top is the restart.
    """
    ends: Counter[str] = Counter()
    pids = {name: pid for name, (pid, *_) in by_name(live).items()}
    with live.client() as client:
        time.sleep(20.0)  # the spare processes are made
        stream = client.stream(prompt_ids=[1, 2, 3], max_tokens=200, ignore_eos=True)
        next(stream)
        if not busy:
            list(stream)
            time.sleep(2.0)
        handle = Handle(pids["replica-0-rank-1"])
        handle.send(signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            if busy:
                ends[f"stream: {list(stream)[-1].outputs[0].finish_reason}"] += 1
            finish: str | None = ""
            while finish != "length" and time.monotonic() < stopped + 90:
                with contextlib.suppress(RolloutError):
                    finish = client.generate(**(ASKED | {"max_tokens": 8})).outputs[0].finish_reason
                    ends[str(finish)] += 1
        finally:
            handle.send(signal.SIGCONT)
            handle.close()
    said = live.log.read_text(errors="replace")
    return {
        "served_again_after_s": round(time.monotonic() - stopped, 2),
        "requests": dict(ends),
        "restarted": sorted(
            n for n, ones in by_name(live).items() if n in pids and ones[0] != pids[n] and n != "spare"
        ),
        "the_last_words": [line[:300] for line in said.splitlines() if "leaving: " in line],
        "load": os.getloadavg()[0],
    }


def _ask(client: Any) -> float:
    began = time.monotonic()
    client.generate(**ASKED)
    return time.monotonic() - began


def _cpu(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
