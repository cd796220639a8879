"""Starts the processes of a service, keeps them running, and stops them in order.

The supervisor knows units (unit.py) and a control socket (supervisor_messages.py); it imports neither Paddle
nor a web framework. Everything starts at once; the end comes kind by kind: the API (so that it can finish
what it has accepted), the replicas (which drain), the store (which removes the shared memory).
"""

import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio

from weight_manager.errors import UNREADABLE
from weight_manager.logs import Lines
from weight_manager.whole_file import replace_file
from worker.background import kept
from worker.child import Output
from worker.rolling import restart_units
from worker.run_dir import RunDir
from worker.spares import Spares
from worker.supervisor_messages import (
    GIVEN_UP_FILE,
    SPARES,
    Failed,
    GetProcesses,
    GivenUp,
    Ok,
    Processes,
    Reply,
    Restart,
    decode_request,
    encode,
    encode_given_up,
)
from worker.unit import Unit, UnitSpec

log = logging.getLogger(__name__)

STOP_ORDER = (("api", "api-worker"), ("replica",), ("fleet",), ("store",))
"""Kinds of units in the order in which they are stopped; those of one entry go together."""
NEEDED = ("api", "replica", "fleet", "store")
"""Kinds without any unit of which nothing works; an API process that does not lead is only missed."""
STDERR = Lines(2)
"""Of a supervisor, which watches its children whether anybody reads what they say or not."""


def to_stderr(_name: str, line: str) -> None:
    """Children write structured lines already: pass them on."""
    STDERR.say(line)


class Supervisor:
    """Runs `units` in a claimed run directory until SIGTERM, SIGINT, SIGHUP, Shutdown, or until it makes no sense.

    SIGHUP is what a terminal sends when it is closed; whoever had it ignored (nohup) goes on.
    """

    def __init__(
        self,
        units: Sequence[UnitSpec],
        run_dir: RunDir,
        output: Output = to_stderr,
        spares: Spares | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._spares = spares
        if spares is not None:
            spares.changed = self._given_up_changed
        self.units = [Unit(spec, run_dir.crashes, output, spares) for spec in units]
        self._stop: asyncio.Event
        self._changed: asyncio.Event
        self._rolling = False

    def run(self) -> int:
        """The exit status: 0 when told to stop, 1 when a unit that the service cannot do without was given up."""
        return asyncio.run(self.main())

    async def main(self) -> int:
        """Startup, watch, shutdown."""
        self._stop, self._changed = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        ends = [signal.SIGTERM, signal.SIGINT]
        ends += [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
        for number in ends:
            loop.add_signal_handler(number, self._stop.set)
        control = asyncio.create_task(kept("status and restarts", self._serve_control))
        lives = {unit: asyncio.create_task(unit.keep(self._given_up_changed)) for unit in self.units}
        spares = asyncio.create_task(kept("making of spares", self._spares.run)) if self._spares else None
        young = asyncio.create_task(kept("refreshing of the run directory", self._run_dir.stay_young))
        try:
            return await self._watch(lives)
        finally:
            beside = [task for task in (control, spares, young) if task]
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            if self._spares:
                await self._spares.close()
            await self._shut_down(lives)

    async def _watch(self, lives: dict[Unit, "asyncio.Task[None]"]) -> int:
        """Until told to stop, or until a unit is given up without which nothing works."""
        stop = asyncio.create_task(self._stop.wait())
        changed: asyncio.Task[Any] = asyncio.create_task(self._changed.wait())
        try:
            while True:
                alive = [task for task in lives.values() if not task.done()]
                await asyncio.wait([stop, changed, *alive], return_when=asyncio.FIRST_COMPLETED)
                if changed.done():
                    self._changed.clear()
                    changed = asyncio.create_task(self._changed.wait())
                if stop.done():
                    log.info("stopping")
                    return 0
                for unit, task in lives.items():
                    if task.done() and task.exception():
                        log.critical("the supervisor failed over %s", unit.spec.name, exc_info=task.exception())
                        return 1
                if any(self._hopeless(kind) for kind in NEEDED):
                    log.critical("stopping: %s", "; ".join(u.why_gave_up for u in self.units if u.why_gave_up))
                    return 1
        finally:
            stop.cancel()
            changed.cancel()

    def _given_up_changed(self) -> None:
        """Say in a file what was given up, and see whether what is left is of use."""
        self._changed.set()
        given_up = {u.spec.name: GivenUp(u.why_gave_up, u.again_at) for u in self.units if u.state == "gave_up"}
        if self._spares is not None and self._spares.why_gave_up:
            given_up[SPARES] = GivenUp(self._spares.why_gave_up, self._spares.again_at)
        path = self._run_dir.path / GIVEN_UP_FILE
        try:
            if given_up:
                replace_file(path, encode_given_up(given_up))
            else:
                path.unlink(missing_ok=True)
        except OSError as error:  # metrics and /health lack it then
            log.error("%s: %s", path, error)

    def _hopeless(self, kind: str) -> bool:
        states = [unit.state for unit in self.units if unit.spec.kind == kind]
        return bool(states) and all(state == "gave_up" for state in states)

    async def _shut_down(self, lives: dict[Unit, "asyncio.Task[None]"]) -> None:
        for kinds in STOP_ORDER:
            some = [unit for unit in self.units if unit.spec.kind in kinds]
            for unit in some:
                unit.stop()
            results = await asyncio.gather(*(lives[unit] for unit in some), return_exceptions=True)
            for unit, result in zip(some, results, strict=True):
                if isinstance(result, BaseException):
                    log.error("%s: %r", unit.spec.name, result)
                    unit.kill()

    async def _serve_control(self) -> None:
        context = zmq.asyncio.Context()
        socket: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 200)
        socket.bind(f"ipc://{self._run_dir.path / 'supervisor.sock'}")
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                frames = await socket.recv_multipart()
                task = asyncio.create_task(self._answer(socket, frames))
                running.add(task)
                task.add_done_callback(running.discard)
        finally:
            for task in running:
                task.cancel()
            socket.close()
            context.term()

    async def _answer(self, socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
        try:
            request = decode_request(frames[-1])
        except UNREADABLE as error:
            reply: Reply = Failed("", f"bad message: {error}")
        else:
            try:
                reply = await self._reply(request)
            except Exception as error:  # whoever asked waits for minutes
                log.exception("%s could not be done", type(request).__name__)
                reply = Failed(request.call, f"it could not be done: {error}")
        await socket.send_multipart([frames[0], encode(reply)])

    async def _reply(self, request: object) -> Reply:
        match request:
            case GetProcesses(call=call):
                return Processes(call, os.getpid(), [p for unit in self.units for p in unit.processes()])
            case Restart(call=call):
                if self._rolling:
                    return Failed(call, "a restart is under way already")
                self._rolling = True
                try:
                    failure = await restart_units(self.units, request, self._run_dir.path)
                finally:
                    self._rolling = False
                return Failed(call, failure) if failure else Ok(call)
            case _:
                self._stop.set()
                return Ok(getattr(request, "call", ""))
