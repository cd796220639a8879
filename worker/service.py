"""The units of one service on this host: one store, one API, `replicas` replicas of `tp` ranks each."""

import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from worker.rendezvous import group_environment, ports_needed
from worker.spares import Spares
from worker.supervisor import to_stderr
from worker.unit import ProcessSpec, UnitSpec


def units_of_service(
    config_path: Path, *, replicas: int, tp: int, drain_s: float = 10.0, shutdown_s: float = 10.0
) -> list[UnitSpec]:
    """What `serve` starts. Every process reads `config_path`; drain_s, shutdown_s: of WorkerConfig and ApiConfig."""
    python = (sys.executable, "-m")
    config = ("--config", str(config_path))
    return [
        UnitSpec("store", "store", (ProcessSpec("store", (*python, "weight_manager", *config)),)),
        *(replica_unit(config_path, replica, tp, drain_s) for replica in range(replicas)),
        UnitSpec("api", "api", (ProcessSpec("api", (*python, "api", *config)),), stop_s=shutdown_s + 5),
    ]


def replica_unit(
    config_path: Path, replica: int, tp: int, drain_s: float, env: Mapping[str, str] | None = None
) -> UnitSpec:
    """The ranks of one replica, which live and die together. env: more environment, for all of them."""
    argv = (sys.executable, "-m", "worker", "--config", str(config_path), "--replica", str(replica))
    ranks = tuple(
        # Ranks have nothing to tidy up that a successor does not, and must not outlive the store by a moment.
        ProcessSpec(f"replica-{replica}-rank-{rank}", (*argv, "--rank", str(rank)), env or {}, signal.SIGKILL, True)
        for rank in range(tp)
    )

    def meet() -> list[dict[str, str]]:
        ports = free_ports(ports_needed(tp))
        return [group_environment(rank, ports) for rank in range(tp)]

    return UnitSpec(f"replica-{replica}", "replica", ranks, stop_s=drain_s + 5, incarnation=meet if tp > 1 else None)


def spares_of_service(config_path: Path, count: int) -> Spares | None:
    """Processes that wait to replace ranks; None when there are to be none."""
    if not count:
        return None
    return Spares((sys.executable, "-m", "worker", "--config", str(config_path), "--spare"), count, to_stderr)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody uses now: fresh ones for every start, so none is in TIME_WAIT."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
