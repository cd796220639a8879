"""The fleet's process as the supervisor runs it."""

import sys
from pathlib import Path

from fleet_ray.messages import SOCKET
from worker.unit import ProcessSpec, RestartPolicy, UnitSpec

PATIENT = RestartPolicy(first_s=1.0, next_s=2.0, max_s=15.0)
"""A Ray cluster that is away may come back: never eight ends within a minute."""
STORES_S = 20.0
"""Seconds to stop the stores of the nodes, after the replicas, and to remove what killed ones have left."""


def fleet_unit(config_path: Path, *, drain_s: float) -> UnitSpec:
    """The unit of the fleet's process. It is stopped before the store, and drains the replicas first."""
    argv = (sys.executable, "-m", "fleet_ray", "--config", str(config_path))
    return UnitSpec(
        *("fleet", "fleet", (ProcessSpec("fleet", argv),)),
        restart=PATIENT,
        stop_s=drain_s + 5 + STORES_S,
        listens=SOCKET,
    )
