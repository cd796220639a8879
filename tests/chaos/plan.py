"""What goes wrong when: a pure function of the seed, so that a run can be had again."""

import random
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Literal

from tests.chaos.trainer import ADAPTERS

What = Literal["kill", "stop", "pause", "clear", "cut"]
QUIET_S = 2.0
"""At the start and the end nothing new is broken."""
KILLS_OF_A_UNIT = 4
"""In any minute: the supervisor gives a unit up that ends eight times in one."""
PAUSE_MODES = ("keep", "recompute", "abort", "wait")
TRAINERS = {"trainer": ""} | {f"trainer of {name}": name for name in ADAPTERS}
"""Processes that push, and the adapter of each; "" = the model."""
_CUT = 0.3
"""Share of the faults of a host below another that are of the network between them."""
TAGS = (("weights", "kv_cache"), ("weights",), ("kv_cache",))


@dataclass(frozen=True)
class Fault:
    """One thing done to a service. target: a process, or how to pause, or what to release; cut: nothing comes through
    between the stores of `host` and of the one above. seconds: how long.
    """

    at: float
    what: What
    target: str
    seconds: float = 0.0
    host: int = 0


def processes(replicas: int, tp: int, api_workers: int = 1) -> list[str]:
    """Everything that may be killed or stopped; the supervisor is only stopped, for nobody would start it again."""
    ranks = [f"replica-{replica}-rank-{rank}" for replica in range(replicas) for rank in range(tp)]
    return [*ranks, "store", "api", *(f"api-{index}" for index in range(1, api_workers)), *TRAINERS, "spare"]


def unit_of(process: str) -> str:
    """What dies with it."""
    return process.rpartition("-rank-")[0] or process


def draw(
    seed: int, seconds: float, every_s: float, replicas: int, tp: int, api_workers: int = 1, stores: int = 1
) -> list[Fault]:
    """A run's faults, in order; on average one every `every_s`. stores: of one host each, one below the other."""
    rng = random.Random(seed)
    faults = _of_one_host(rng, seconds, every_s, processes(replicas, tp, api_workers))
    if stores == 1:
        return faults
    placed: list[Fault] = []
    for fault in faults:
        host = 0 if fault.target in TRAINERS else rng.randrange(stores)
        if host and rng.random() < _CUT:
            placed.append(Fault(fault.at, "cut", "network", rng.choice((0.5, 2.0, 8.0)), host))
        else:
            placed.append(replace(fault, host=host))
    return placed


def _of_one_host(rng: random.Random, seconds: float, every_s: float, names: list[str]) -> list[Fault]:
    kills: dict[str, list[float]] = defaultdict(list)
    faults: list[Fault] = []
    at = QUIET_S
    while (at := at + rng.expovariate(1 / every_s)) < seconds - QUIET_S:
        what = rng.choices(("kill", "stop", "pause", "clear"), (35, 30, 20, 15))[0]
        if what == "kill":
            target = rng.choice(names)
            recent = [t for t in kills[unit_of(target)] if t > at - 60]
            if len(recent) < KILLS_OF_A_UNIT:
                kills[unit_of(target)].append(at)
                faults.append(Fault(at, "kill", target))
        elif what == "stop":
            faults.append(Fault(at, "stop", rng.choice([*names, "supervisor"]), rng.choice((0.1, 0.5, 2.0, 8.0))))
        elif what == "pause":
            faults.append(Fault(at, "pause", rng.choice(PAUSE_MODES), rng.uniform(0.1, 2.0)))
        else:
            faults.append(Fault(at, "clear", "+".join(rng.choice(TAGS)), rng.uniform(0.1, 2.0)))
    return faults
