"""What runs beside a service as long as it is tried: clients in one process, and trainers in processes of their own."""

import asyncio
import ctypes
import json
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any


class Crowd:
    """`count` clients at once, until stopped. What one does is `_client`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Until `stop`."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._client(number))

    def stop(self) -> None:
        """After the requests under way."""
        self._over.set()

    async def _client(self, number: int) -> None:
        """Ask until it is over."""
        raise NotImplementedError


async def start_trainer(module: str, *words: str) -> asyncio.subprocess.Process:
    """A process that says what it does, which ends with this one."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *words),
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),
    )


async def said(trainer: asyncio.subprocess.Process) -> AsyncIterator[dict[str, Any]]:
    """Its lines, until it ends."""
    assert trainer.stdout is not None
    async for line in trainer.stdout:
        yield json.loads(line)
