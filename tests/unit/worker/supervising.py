"""Small supervisors of small processes, run beside a script."""

import asyncio
import socket
import sys
import time
from pathlib import Path

import zmq

from worker.supervisor import Supervisor
from worker.supervisor_messages import (
    decode_reply,
    encode,
)
from worker.unit import ProcessSpec, RestartPolicy, UnitSpec

QUICK = RestartPolicy(first_s=0.0, next_s=0.05, max_s=0.2, give_up=4, within_s=30)
SLEEP = "import time; time.sleep(60)"


def python(name, code, **kwargs):
    return ProcessSpec(name, (sys.executable, "-c", code), **kwargs)


def unit(name, kind, *codes, restart=QUICK, **kwargs):
    processes = tuple(python(f"{name}-{i}" if len(codes) > 1 else name, code) for i, code in enumerate(codes))
    return UnitSpec(name, kind, processes, restart, **{"stop_s": 2.0, **kwargs})


def supervise(units, run_dir, lines, script):
    """Run a supervisor and, beside it, `script(supervisor)`; stops when the script is through."""
    supervisor = Supervisor(units, run_dir, lambda name, line: lines.append((name, line)))

    async def play():
        main = asyncio.create_task(supervisor.main())
        await asyncio.sleep(0.05)
        try:
            await asyncio.wait_for(script(supervisor), 20)
        finally:
            if not main.done():
                supervisor._stop.set()
            status = await asyncio.wait_for(main, 20)
        return status

    return asyncio.run(play())


async def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        await asyncio.sleep(0.02)


def pids(supervisor):
    return {p.name: p.pid for u in supervisor.units for p in u.processes()}


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def connects(path):
    """Whether somebody listens on a socket."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True


async def ask(run_dir, message):
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.connect(f"ipc://{run_dir.path / 'supervisor.sock'}")
        await dealer.send(encode(message) if not isinstance(message, bytes) else message)
        return decode_reply(await asyncio.wait_for(dealer.recv(), 10))
    finally:
        dealer.close(linger=0)
        context.term()
