"""One call to the supervisor of a local service, or to its fleet's process, over a socket in its run directory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from fleet_ray import messages as fleet_messages
from worker import supervisor_messages
from worker.supervisor_messages import Failed, Reply, Request


def ask(run_dir: Path, build: Callable[[str], Request], *, timeout_s: float) -> Reply:
    """The supervisor's answer. Raises OSError when there is none, ValueError with its refusal."""
    answer = _ask(run_dir / "supervisor.sock", supervisor_messages.encode(build("cli")), "supervisor", timeout_s)
    reply: Reply = supervisor_messages.decode_reply(answer)
    if isinstance(reply, Failed):
        raise ValueError(reply.message)
    return reply


def ask_fleet(
    run_dir: Path, build: Callable[[str], fleet_messages.Request], *, timeout_s: float
) -> fleet_messages.FleetState:
    """The answer of the process that keeps replicas on Ray. Raises as `ask`."""
    if (run_dir / "supervisor.sock").exists() and not (run_dir / fleet_messages.SOCKET).exists():
        raise OSError(f"the service in {run_dir} does not run on Ray, or is not there yet (`serve --ray`)")
    answer = _ask(run_dir / fleet_messages.SOCKET, fleet_messages.encode(build("cli")), "fleet", timeout_s)
    reply: fleet_messages.Reply = fleet_messages.decode_reply(answer)
    if isinstance(reply, fleet_messages.Failed):
        raise ValueError(reply.message)
    return reply


def _ask(path: Path, message: bytes, who: str, timeout_s: float) -> bytes:
    if not path.exists():
        raise OSError(f"no service runs in {path.parent}; say --name or --run-dir")
    context = zmq.Context()
    socket: Any = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{path}")
        socket.send(message)
        if not socket.poll(int(timeout_s * 1000)):
            raise OSError(f"no answer from the {who} in {path.parent} within {timeout_s:.0f} s")
        answer: bytes = socket.recv()
        return answer
    finally:
        socket.close()
        context.term()
