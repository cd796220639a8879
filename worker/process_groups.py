"""Every process group of a rank: making them, shutting those that can be shut, bringing them back.

Facts of Paddle 3.x this file stands on (paddle/distributed/collective.py):
  - only ProcessGroupNCCL has shutdown() and restart(); asking a gloo group raises AttributeError;
  - shutdown_process_group() without a group walks the registry and stops at the first gloo group, with the
    groups before it shut and those after it up;
  - taking entries out of the registry breaks new_group for ever (KeyError '_default_pg');
  - a group of one rank, or one this rank is not in, has no process group at all.
So groups are shut and restarted one by one, with Paddle's public calls and an explicit group, in one order
that is the same on every rank (group ids, which rise in order of creation), and the registry is only read.
Each half stops at the first failure and may be called again: it then takes up where it stopped.
"""

import contextlib
import ctypes
import logging
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from worker.models.collectives import GlooSums, Sums
from worker.orders import GroupDead
from worker.rendezvous import SIGNAL_STORE

log = logging.getLogger(__name__)

PR_SET_TIMERSLACK = 29
PATIENCE_NS = 90_000_000
"""How late the timers of gloo's threads may be; see `_patient`."""


class GroupError(RuntimeError):
    """A group could not be shut or restarted. done: groups this call changed before; group: the one at fault."""

    def __init__(self, verb: str, group: str, done: Iterable[str], cause: BaseException) -> None:
        self.group = group
        self.done = list(done)
        before = f" (before it: {', '.join(self.done)})" if self.done else ""
        super().__init__(f"cannot {verb} group {group}{before}: {type(cause).__name__}: {cause}")


class PaddleTooOld(RuntimeError):
    """This build of Paddle has groups that need shutting and no call that does it."""


def can_be_shut(group: Any) -> bool:
    """Whether the group's backend can give its memory back and return: asked of the object, not of its name."""
    backend = group.process_group
    return all(callable(getattr(backend, verb, None)) for verb in ("shutdown", "restart"))


class ProcessGroups:
    """The groups of this process as Paddle's registry lists them, ours and other people's (fleet)."""

    def __init__(self, distributed: ModuleType | Any, *, sums: Sums | None = None) -> None:
        """sums: what `prove` tries."""
        self._dist = distributed
        self.sums = sums

    def groups(self) -> list[Any]:
        """All that can be shut, in the fixed order. The world's is left alone, as Paddle's own walk leaves it."""
        registry = dict(self._dist.collective._get_group_map_by_name())
        world = self._dist.collective._default_group_name
        chosen = [group for name, group in registry.items() if can_be_shut(group) and name != world]
        return sorted(chosen, key=lambda group: int(group.id))

    def shutdown(self) -> list[str]:
        """Shut what is up; returns the names this call shut. Raises GroupError, PaddleTooOld."""
        return self._each("shutdown", {group.name for group in self.groups()} - self._shut_names())

    def restart(self) -> list[str]:
        """Bring back what is shut; returns the names this call restarted. Raises GroupError, PaddleTooOld."""
        return self._each("restart", self._shut_names())

    def prove(self) -> None:
        """Try the matrices' sums, after a step that failed. Raises GroupDead: none will go well any more.

        A rank that stood still for 30 s within a step fails that step on every rank, and all that come.
        """
        if self.sums is None:
            return
        try:
            self.sums.prove()
        except RuntimeError as error:
            last = str(error).strip().splitlines()[-1:]
            raise GroupDead(f"the group of the matrices' sums is dead: {''.join(last)}") from error

    def _each(self, verb: Literal["shutdown", "restart"], names: set[str]) -> list[str]:
        todo = [group for group in self.groups() if group.name in names]
        if not todo:
            return []
        call = getattr(self._dist, f"{verb}_process_group", None)
        if call is None:
            raise PaddleTooOld(
                f"this Paddle has no {verb}_process_group, so {', '.join(g.name for g in todo)} would keep its "
                "device memory; use Paddle 3.0 or later, or release only the KV cache (tags=kv_cache)"
            )
        done: list[str] = []
        for group in todo:
            try:
                call(group)
            except Exception as error:
                raise GroupError(verb, group.name, done, error) from error
            done.append(group.name)
        log.info("%s of groups: %s", verb, ", ".join(done))
        return done

    def _shut_names(self) -> set[str]:
        shut = getattr(self._dist.collective, "_get_shutdown_group_map_by_name", dict)
        return set(shut())


@dataclass(frozen=True)
class Joined:
    """This rank's place among the ranks of its replica."""

    groups: ProcessGroups
    signal: Any  # gloo, CPU tensors; made once, never shut
    sums: GlooSums  # of the matrices, for ranks that have nothing better
    store: Any  # kept alive for as long as the signal group


def join(rank: int, size: int, *, deadline_s: float) -> Joined:
    """Meet the other ranks where `rendezvous.group_environment` says. Raises TimeoutError.

    Paddle's rendezvous servers listen on all interfaces, without a password: a firewall must cover their ports.
    """
    if os.environ.get("PADDLE_TRAINER_ID") != str(rank) or os.environ.get("PADDLE_TRAINERS_NUM") != str(size):
        raise ValueError("tensor-parallel ranks need the PADDLE_* variables that `paddle-rollout serve` sets")
    import paddle.distributed as dist  # noqa: PLC0415  a replica of one rank needs no group
    from paddle.base.core import TCPStore  # noqa: PLC0415

    if rank:
        # Paddle's client sleeps for 3 s when nobody listens yet.
        _wait_for(os.environ["PADDLE_MASTER"], deadline_s)
    with _patient():
        dist.init_parallel_env()
        host, _, port = os.environ[SIGNAL_STORE].rpartition(":")
        if rank:
            _wait_for(os.environ[SIGNAL_STORE], deadline_s)
        store = TCPStore(host, int(port), rank == 0, size, int(deadline_s))
        ranks = list(range(size))
        signal = _gloo_group(dist, ranks, store)
        sums = GlooSums(dist.get_group(0))  # the world's: gloo (rendezvous.py) and nobody else's
    return Joined(ProcessGroups(dist, sums=sums), signal, sums, store)


@contextlib.contextmanager
def _patient() -> Iterator[None]:
    """Let the timers of threads that are started inside fire late: gloo's wake for nothing every 10 ms.

    Each gloo device has a thread whose epoll_wait ends after 10 ms to see whether it should end: four threads of a
    rank woke 400 times a second, two per cent of a core. A thread takes its timer slack from the one that starts it,
    and slack delays timers only: what arrives on a socket wakes the thread at once, as before.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: 0
    prctl(PR_SET_TIMERSLACK, PATIENCE_NS, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_TIMERSLACK, 0, 0, 0, 0)  # 0: the default again


def _gloo_group(distributed: Any, ranks: list[int], store: Any) -> Any:
    """A gloo group that meets on a store of its own.

    Paddle's gloo groups all publish their addresses under the same keys ("/" and the rank), so a second group
    on the same store may read those of the first: with three ranks every few starts hung, or was refused a
    connection, until gloo gave up after 30 s.
    """
    collective = distributed.collective
    before = collective._default_store
    collective._set_default_store(store)
    try:
        return distributed.new_group(ranks, backend="gloo")
    finally:
        collective._set_default_store(before)


def _wait_for(endpoint: str, deadline_s: float) -> None:
    host, _, port = endpoint.rpartition(":")
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"rank 0 does not listen on {endpoint} after {deadline_s:g} s") from None
            time.sleep(0.05)
        else:
            return
