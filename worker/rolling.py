"""Restarting units one after the other while the service serves: drain, end, start, wait until ready."""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from worker.messages import Drain, GetStats, Stats, ToApi, decode_to_api, encode
from worker.supervisor_messages import Restart
from worker.unit import Unit

log = logging.getLogger(__name__)

_READY = ("serving", "paused", "cleared")
_POLL_S = 0.1
_ANSWER_S = 2.0
"""How long one that is there may take to say so."""


async def restart_units(units: Sequence[Unit], request: Restart, run_dir: Path) -> str:
    """Restart the named units, or all replicas. Returns "" or why it stopped at one."""
    by_name = {unit.spec.name: unit for unit in units}
    unknown = sorted(set(request.units) - by_name.keys())
    elsewhere = "a service on Ray has its replicas on the nodes of the cluster"
    if unknown:
        where = "" if any(unit.spec.kind == "replica" for unit in units) else f"; {elsewhere}"
        return f"no such unit: {', '.join(unknown)}; there are {', '.join(by_name)}{where}"
    chosen = [by_name[name] for name in request.units] or [u for u in units if u.spec.kind == "replica"]
    if not chosen:
        return f"no replica runs on this host: {elsewhere}"
    for unit in chosen:
        if unit.state not in ("running", "gave_up"):
            return f"{unit.spec.name} is {unit.state}"
        log.info("restarting %s", unit.spec.name, extra={"unit": unit.spec.name})
        failure = await _restart(unit, request, run_dir)
        if failure:
            return f"{unit.spec.name}: {failure}"
    return ""


async def _restart(unit: Unit, request: Restart, run_dir: Path) -> str:
    socket = run_dir / f"{unit.spec.name}.sock"
    if unit.state == "gave_up":
        unit.try_again()
    else:
        await _end(unit, request, socket)
    deadline = time.monotonic() + request.ready_s
    while time.monotonic() < deadline:
        if unit.state == "gave_up":
            return unit.why_gave_up
        if unit.state == "running" and await _is_back(unit, socket):
            return ""
        await asyncio.sleep(_POLL_S)
    return f"not ready {request.ready_s:g} s after its start"


async def _is_back(unit: Unit, socket: Path) -> bool:
    """Whether others can use it."""
    if unit.spec.kind == "replica":
        answer = await _ask(socket, GetStats("ready"), _ANSWER_S)
        return isinstance(answer, Stats) and answer.state in _READY
    return await _listens(socket.parent / unit.spec.listens) if unit.spec.listens else True


async def _listens(where: Path) -> bool:
    """Whether somebody takes connections: on this socket, or at the URL in this file."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            if where.suffix == ".sock":
                _, writer = await asyncio.open_unix_connection(where)
            else:
                _, writer = await asyncio.open_connection(*_said(where))
    except (OSError, ValueError, TimeoutError):
        return False
    writer.close()
    return True


def _said(where: Path) -> tuple[str | None, int | None]:
    url = urlsplit(where.read_text().strip())
    return url.hostname, url.port


async def _end(unit: Unit, request: Restart, socket: Path) -> None:
    """Drain it, and wait until it has ended; it starts again by itself."""
    before = unit.restarts
    unit.cycle()
    if unit.spec.kind != "replica":
        unit.terminate()
    elif not await _ask(socket, Drain("restart", request.drain_s), request.drain_s + 2):
        unit.terminate()  # it does not answer; SIGTERM drains too
    deadline = time.monotonic() + request.drain_s + unit.spec.stop_s
    while unit.restarts == before:
        if time.monotonic() >= deadline:
            log.error("%s does not end: killed", unit.spec.name)
            unit.kill()
            deadline = float("inf")
        await asyncio.sleep(_POLL_S)


async def _ask(path: Path, message: Drain | GetStats, timeout_s: float) -> ToApi | None:
    """The replica's answer, None when there is none in time."""
    context = zmq.asyncio.Context()
    socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    try:
        socket.connect(f"ipc://{path}")
        await socket.send(encode(message))
        async with asyncio.timeout(timeout_s):
            while True:
                reply: ToApi = decode_to_api(await socket.recv())
                if getattr(reply, "call", None) == message.call:
                    return reply
    except TimeoutError:
        return None
    finally:
        socket.close()
        context.term()
