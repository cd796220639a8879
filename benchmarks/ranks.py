"""Processes that meet as the ranks of one replica, for what is measured between them."""

import os
import subprocess
from collections.abc import Mapping, Sequence

from worker.rendezvous import group_environment, ports_needed
from worker.service import free_ports


def said_by_ranks(
    command: Sequence[str], size: int, *, timeout_s: float, env: Mapping[str, str] | None = None
) -> list[str]:
    """Run `command` once for each rank; what each printed. env: beside PADDLE_*. Raises TimeoutExpired."""
    ports = free_ports(ports_needed(size))
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **group_environment(rank, ports), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        return [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
