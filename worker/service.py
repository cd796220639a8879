"""The units of one service on this host: one store, one API, `replicas` replicas of `tp` ranks each."""

import contextlib
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
    config_path: Path, *, replicas: int, tp: int, drain_s: float = 10.0, shutdown_s: float = 10.0, api_workers: int = 1
) -> list[UnitSpec]:
    """What `serve` starts. Every process reads `config_path`; drain_s, shutdown_s: of WorkerConfig and ApiConfig.

    api_workers: processes of the API. The first is the one that leads; the others can end and come back without it.
    """
    python = (sys.executable, "-m")
    config = ("--config", str(config_path))
    return [
        UnitSpec("store", "store", (ProcessSpec("store", (*python, "weight_manager", *config)),), listens="store.sock"),
        *(replica_unit(config_path, replica, tp, drain_s) for replica in range(replicas)),
        UnitSpec(
            "api",
            "api",
            (ProcessSpec("api", (*python, "api", *config)),),
            stop_s=shutdown_s + 5,
            listens="api-0.sock" if api_workers > 1 else "http_url",
        ),
        *(
            UnitSpec(
                f"api-{index}",
                "api-worker",
                (ProcessSpec(f"api-{index}", (*python, "api", *config, "--index", str(index))),),
                stop_s=shutdown_s + 5,
                listens=f"api-{index}.sock",
            )
            for index in range(1, api_workers)
        ),
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


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """TCP ports that nobody uses there now: fresh ones for every start, so none is in TIME_WAIT."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(family)) for _ in range(count)]
        for one in sockets:
            one.bind((host, 0))
        return [int(one.getsockname()[1]) for one in sockets]
