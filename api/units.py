"""The processes that run beside this one, as their supervisor tells of them: what it has given up, and restarts."""

import secrets
from collections.abc import Mapping
from pathlib import Path

import zmq
import zmq.asyncio

from api.errors import Conflict, TimedOut, Unavailable
from weight_manager.errors import UNREADABLE
from worker.supervisor_messages import (
    GIVEN_UP_FILE,
    Failed,
    GetProcesses,
    GivenUp,
    Processes,
    Reply,
    Restart,
    decode_given_up,
    decode_reply,
    encode,
)

ASK_S = 10.0
"""How long the supervisor may take to say what runs."""


class Units:
    """Of the service in a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def given_up(self) -> dict[str, GivenUp]:
        """Units that ended too often, or could not start, and wait until they are tried again."""
        try:
            return decode_given_up((self._run_dir / GIVEN_UP_FILE).read_bytes())
        except (OSError, *UNREADABLE):
            return {}

    async def restart(self, unit: str, *, drain_s: float, ready_s: float) -> None:
        """Drain it, end it and start it, or only start it if it was given up; returns once it is ready.

        Raises Unavailable without a supervisor, Conflict with what it says if it does not, TimedOut.
        """
        path = self._run_dir / "supervisor.sock"
        if not path.exists():
            raise Unavailable("no supervisor runs beside this API: whoever started its processes restarts them")
        request = Restart(secrets.token_hex(8), [unit], drain_s, ready_s)
        context = zmq.asyncio.Context.instance()
        socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        try:
            socket.set(zmq.LINGER, 0)
            socket.connect(f"ipc://{path}")
            await socket.send(encode(GetProcesses(request.call)))
            found = await _answer(socket, ASK_S, "the supervisor does not say what runs")
            stops_s = found.stops_s([unit]) if isinstance(found, Processes) else []
            await socket.send(encode(request))
            longest_s = request.longest_s(stops_s or [0.0])  # no such unit: it says so at once
            reply = await _answer(socket, longest_s, f"the supervisor does not say whether {unit} is back")
        finally:
            socket.close()
        if isinstance(reply, Failed):
            raise Conflict(reply.message)


async def _answer(socket: zmq.asyncio.Socket, timeout_s: float, late: str) -> Reply:
    if not await socket.poll(int(timeout_s * 1000)):
        raise TimedOut(late)
    reply: Reply = decode_reply(await socket.recv())
    return reply


def why_away(given_up: Mapping[str, GivenUp], replica: int) -> str:
    """Why a replica is not there, if it was given up; else ""."""
    found = given_up.get(f"replica-{replica}")
    return "" if found is None else f"given up: {found.why}"
