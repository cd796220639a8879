"""Processes that live and die together: the store, the API, or all ranks of one replica."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from weight_manager.whole_file import replace_file
from worker.child import Child, Output, describe
from worker.spares import Spares
from worker.supervisor_messages import Process

log = logging.getLogger(__name__)

Kind = Literal["store", "fleet", "replica", "api", "api-worker"]
EXIT_CONFIG = 78
"""sysexits' EX_CONFIG: starting again would end the same way, so nobody tries, unless it has run before."""
_USAGE = 2
_NEVER_RAN = (EXIT_CONFIG, _USAGE)
"""Who ends so was still starting, however long that took: it may read weights for an hour first."""
_START_S = 10.0
"""What lives so long, and does not end as one of `_NEVER_RAN`, has run."""
_BELIEVED = 2
"""Python ends with status 1 over any error that nobody thought of, a port or memory that another has for a moment among
them. What has never run and says so the second time in a row would say the same the third time.
"""
_FOLLOW_S = 2.0
"""Seconds that the other processes of a unit have once the first has ended as it was asked to."""
_REPORTS = 50
"""Crash reports kept, the newest."""


@dataclass(frozen=True)
class RestartPolicy:
    """How often, and how long after, a unit that ended by itself is started again. Seconds."""

    first_s: float = 0.0
    """Before the first restart."""
    next_s: float = 0.5
    """Before the second; doubled each time."""
    max_s: float = 10.0
    """The most between two tries."""
    give_up: int = 8
    """So many ends of the unit ..."""
    within_s: float = 60.0
    """... within this many seconds, and the unit is given up."""
    retry_s: float = 120.0
    """Before what was given up is tried again; doubled each time."""
    retry_max_s: float = 1800.0
    """The most between two such tries. What has run for so long begins with the first wait again."""

    def delay(self, failures: int) -> float:
        """Seconds before the next start, after `failures` >= 1 recent ends."""
        return self.first_s if failures == 1 else min(self.max_s, self.next_s * 2.0 ** (failures - 2))

    def retry_delay(self, times: int) -> float:
        """Seconds before the next try, after the unit was given up for the `times`th time, >= 1."""
        return min(self.retry_max_s, self.retry_s * 2.0 ** min(times - 1, 32))  # weeks of tries overflow


@dataclass(frozen=True)
class ProcessSpec:
    """One process of a unit. death_signal: what it gets when the supervisor dies. spare: it can take one's place."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    death_signal: signal.Signals = signal.SIGTERM
    spare: bool = False


@dataclass(frozen=True)
class UnitSpec:
    """A unit. The first process is the one that is asked to stop; the others follow it.

    incarnation: called before each start; extra environment per process, e.g. free ports to meet on.
    stop_s: how long after SIGTERM it may run before SIGKILL.
    listens: the socket in the run directory on which it listens once it can be used, or a file that says the URL of one
    ("http_url"). "": a replica, which is asked.
    """

    name: str
    kind: Kind
    processes: tuple[ProcessSpec, ...]
    restart: RestartPolicy = RestartPolicy()
    stop_s: float = 15.0
    incarnation: Callable[[], list[dict[str, str]]] | None = None
    listens: str = ""


State = Literal["running", "backoff", "stopping", "stopped", "gave_up"]


class Unit:
    """Keeps its processes running until told to stop, or until it gives up: `run`. `keep` goes on after that.

    again_at: by `time.time()`, when what was given up is tried again.
    """

    def __init__(self, spec: UnitSpec, crashes: Path, output: Output, spares: Spares | None = None) -> None:
        self.spec = spec
        self.state: State = "backoff"
        self.restarts = 0
        self.last_exit: dict[str, str] = {}
        self.why_gave_up = ""
        self.again_at = 0.0
        self._crashes = crashes
        self._output = output
        self._spares = spares
        self._children: list[Child] = []
        self._failures: deque[float] = deque()
        self._stopping = asyncio.Event()
        self._hurried = asyncio.Event()
        self._cycling = False
        self._has_run = False
        self._failed_starts = 0  # in a row, with status 1

    async def keep(self, changed: Callable[[], None]) -> None:
        """`run`, and again after it was given up: seldom, or at once when `try_again` is called. Returns once stopped.

        changed: called when the unit was given up, and when that is over.
        """
        times = 0
        while True:
            began = time.monotonic()
            await self.run()
            if self.state != "gave_up":
                return
            times = 1 if time.monotonic() - began >= self.spec.restart.retry_max_s else times + 1
            delay = self.spec.restart.retry_delay(times)
            self.again_at = time.time() + delay
            changed()
            await _first(self._stopping.wait(), self._hurried.wait(), asyncio.sleep(delay))
            if self._stopping.is_set():
                return
            self.try_again()
            self._hurried.clear()
            log.warning("%s had been given up: trying it again", self.spec.name, extra={"unit": self.spec.name})
            changed()

    def try_again(self) -> None:
        """Start what was given up as if for the first time."""
        if self.state == "gave_up":
            self.state, self.why_gave_up = "backoff", ""
            self._failures.clear()
            self._failed_starts = 0
            self._hurried.set()

    async def run(self) -> None:
        """Start, watch, restart. Returns once stopped or given up."""
        while not self._stopping.is_set():
            try:
                self._start()
            except (OSError, subprocess.SubprocessError) as error:  # no memory for a process, or too many of them
                await self._abandon(error)
                planned = False
            else:
                await self._until_one_ends()
                if self._stopping.is_set():
                    await self._stop()
                    break
                planned, self._cycling = self._cycling, False
                await self._end_rest(planned)
            self.restarts += 1
            if planned:
                continue
            delay = self._note_failure()
            if delay is None:
                self.state = "gave_up"
                return
            self.state = "backoff"
            log.warning("%s: starting again in %.1f s", self.spec.name, delay, extra={"unit": self.spec.name})
            await _first(self._stopping.wait(), asyncio.sleep(delay))
        self.state = "stopped"

    def stop(self) -> None:
        """End it in order; `run` returns when it is over."""
        self._stopping.set()

    def cycle(self) -> None:
        """The next end is planned (a drain was asked for): start again at once, without counting it."""
        self._cycling = True

    def terminate(self) -> None:
        """SIGTERM to the process that decides for the unit."""
        if self._children:
            self._children[0].send(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to all of it."""
        for child in self._children:
            child.send(signal.SIGKILL)

    def processes(self) -> list[Process]:
        """The processes, as `status` shows them."""
        pids = {child.name: child for child in self._children if child.status is None}
        now = time.monotonic()
        return [
            Process(
                name=spec.name,
                unit=self.spec.name,
                kind=self.spec.kind,
                state=self.state,
                pid=pids[spec.name].pid if spec.name in pids else None,
                restarts=self.restarts,
                uptime_s=round(now - pids[spec.name].started, 3) if spec.name in pids else 0.0,
                last_exit=self.last_exit.get(spec.name, ""),
                stop_s=self.spec.stop_s,
            )
            for spec in self.spec.processes
        ]

    def _start(self) -> None:
        self._children = []
        extra = self.spec.incarnation() if self.spec.incarnation else [{} for _ in self.spec.processes]
        for spec, more in zip(self.spec.processes, extra, strict=True):
            self._children.append(self._child(spec, more))
        self.state = "running"
        for child in self._children:
            log.info("started %s", child.name, extra={"unit": self.spec.name, "child": child.pid})

    def _child(self, spec: ProcessSpec, more: Mapping[str, str]) -> Child:
        env = {**spec.env, **more}
        if self._spares:
            self._spares.disturb()
            spare = self._spares.take(spec.name, spec.argv, env) if spec.spare else None
            if spare:
                return spare
        return Child(spec.name, spec.argv, {**os.environ, **env}, spec.death_signal, self._output)

    async def _until_one_ends(self) -> None:
        await _first(self._stopping.wait(), *(child.wait() for child in self._children))

    async def _abandon(self, error: Exception) -> None:
        """One could not be started: those before it go, and all are tried again as after an end."""
        log.error("%s cannot be started: %s", self.spec.name, error, extra={"unit": self.spec.name})
        self.kill()
        await self._all_ended()
        self._note_exits()

    async def _end_rest(self, planned: bool) -> None:
        """One ended, so the others go: the ranks of a replica are of no use one by one."""
        await self._followed(_FOLLOW_S if planned else 0.0)
        self._report(planned)
        self.kill()
        await self._all_ended()
        self._note_exits()

    async def _stop(self) -> None:
        self.state = "stopping"
        self.terminate()
        first = self._children[0]
        await _first(asyncio.sleep(self.spec.stop_s), first.wait())
        if first.status is None:
            log.error("%s did not stop within %g s: killed", self.spec.name, self.spec.stop_s)
        else:
            await self._followed(_FOLLOW_S)
        self.kill()
        await self._all_ended()
        self._note_exits()

    async def _followed(self, within_s: float) -> None:
        await _first(asyncio.sleep(within_s), self._all_ended())

    async def _all_ended(self) -> None:
        for child in self._children:
            await child.wait()

    def _note_exits(self) -> None:
        self.last_exit = {child.name: describe(child.status or 0) for child in self._children}

    def _note_failure(self) -> float | None:
        """Seconds to wait before the next start; None = give up."""
        now = time.monotonic()
        self._failures.append(now)
        while self._failures[0] < now - self.spec.restart.within_s:
            self._failures.popleft()
        first = self._children[0] if self._children else None
        if first is not None and first.status is not None and self._said_why(first, now):
            self.why_gave_up = f"{first.name} cannot start ({describe(first.status)})"
        elif len(self._failures) >= self.spec.restart.give_up:
            self.why_gave_up = f"{self.spec.name} ended {len(self._failures)} times in {self.spec.restart.within_s:g} s"
        if self.why_gave_up:
            last = f"; its last words: {first.lines[-1]}" if first is not None and first.lines else ""
            log.critical("%s: given up%s", self.why_gave_up, last, extra={"unit": self.spec.name})
            return None
        return self.spec.restart.delay(len(self._failures))

    def _said_why(self, first: Child, now: float) -> bool:
        """Whether a second start would end as this one did."""
        says_why = first.status in _NEVER_RAN
        self._has_run |= not says_why and now - first.started >= _START_S
        if self._has_run:
            return False  # what it was told is right, so that something else is wrong now, and may be mended
        self._failed_starts = self._failed_starts + 1 if first.status == 1 else 0
        return says_why or self._failed_starts == _BELIEVED

    def _report(self, planned: bool) -> None:
        """A readable account of a process that ended without being asked to."""
        for child in self._children:
            if child.status in (None, 0) or (planned and child.status == -signal.SIGTERM):
                continue  # a planned end may come before the process has its handler
            assert child.status is not None
            how, lived, now = describe(child.status), time.monotonic() - child.started, datetime.now(UTC)
            head = f"{child.name} (pid {child.pid}): {how} after {lived:.1f} s, at {now.isoformat(timespec='seconds')}"
            path = self._crashes / f"{now:%Y%m%dT%H%M%S.%f}-{child.name}.txt"
            lines = "\n".join(child.lines)
            try:
                self._crashes.mkdir(parents=True, exist_ok=True)
                text = f"{head}\nrestarts before: {self.restarts}\n\nlast output:\n{lines}\n"
                replace_file(path, text.encode(errors="replace"))  # an empty one would take the place of another
            except OSError as error:  # a full disk is no reason not to start it again
                log.error("%s; no report could be written: %s", head, error, extra={"unit": self.spec.name})
            else:
                log.error("%s; report: %s", head, path, extra={"unit": self.spec.name})
        with contextlib.suppress(OSError):
            for old in sorted(self._crashes.glob("*.txt"))[:-_REPORTS]:
                old.unlink(missing_ok=True)


async def _first(*awaitables: object) -> None:
    """Wait until one is through; the others are cancelled."""
    tasks = [asyncio.ensure_future(a) for a in awaitables]  # type: ignore[call-overload]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
