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
    GivenUp,
    Restart,
    decode_given_up,
    decode_reply,
    encode,
)


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
            await socket.send(encode(request))
            if not await socket.poll(int(request.longest_s(1) * 1000)):
                raise TimedOut(f"the supervisor does not say whether {unit} is back")
            reply = decode_reply(await socket.recv())
        finally:
            socket.close()
        if isinstance(reply, Failed):
            raise Conflict(reply.message)


def why_away(given_up: Mapping[str, GivenUp], replica: int) -> str:
    """Why a replica is not there, if it was given up; else ""."""
    found = given_up.get(f"replica-{replica}")
    return "" if found is None else f"given up: {found.why}"
