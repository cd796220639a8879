"""One call to the supervisor of a local service, over run_dir/supervisor.sock."""

from collections.abc import Callable
from pathlib import Path

import zmq

from worker import supervisor_messages as messages
from worker.supervisor_messages import Failed, Reply, Request


def ask(run_dir: Path, build: Callable[[str], Request], *, timeout_s: float) -> Reply:
    """The supervisor's answer. Raises OSError when there is none, ValueError with its refusal."""
    path = run_dir / "supervisor.sock"
    if not path.exists():
        raise OSError(f"no service runs in {run_dir}; say --name or --run-dir")
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{path}")
        socket.send(messages.encode(build("cli")))
        if not socket.poll(int(timeout_s * 1000)):
            raise OSError(f"no answer from the supervisor in {run_dir} within {timeout_s:.0f} s")
        reply: Reply = messages.decode_reply(socket.recv())
    finally:
        socket.close()
        context.term()
    if isinstance(reply, Failed):
        raise ValueError(reply.message)
    return reply
