"""Chat templates of requests, written in a process that is killed when one takes too long or too much.

A template is a program: a few loops in each other run for years, and a text times a billion fills the memory. The
sandbox that it runs in keeps it from Python, not from that.
"""

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process

import msgspec

from api.errors import Unavailable
from worker.chat_template import Rendering
from worker.template_child import READY, Outcome

log = logging.getLogger(__name__)

LIMIT_S = 1.0
"""Seconds for one prompt, from when the process has it."""
START_S = 20.0


class TemplateProcess:
    """One process, started when it is first needed and after each that was killed; prompts are written one by one."""

    def __init__(self, *, max_chars: int) -> None:
        self._max_chars = max_chars  # of a prompt
        self._process: Process | None = None
        self._turn = asyncio.Lock()

    async def text(self, rendering: Rendering) -> str:
        """The prompt. Raises ValueError when the template fails or takes too much, Unavailable without a process."""
        try:
            frame = msgspec.msgpack.encode(rendering)
        except (ArithmeticError, RecursionError, TypeError) as error:
            raise ValueError(f"chat template: it cannot be given what came with the request: {error}") from None
        async with self._turn:
            try:
                return await self._written(frame)
            except BaseException as error:
                if type(error) is not ValueError:  # what it would say next is not known
                    await self._end()
                raise

    async def close(self) -> None:
        """End the process, if there is one."""
        async with self._turn:
            await self._end()

    async def _written(self, frame: bytes) -> str:
        if self._process is None or self._process.returncode is not None:
            await self._end()
            await self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(LIMIT_S):
                process.stdin.write(len(frame).to_bytes(4, "little") + frame)
                size = int.from_bytes(await process.stdout.readexactly(4), "little")
                reply = await process.stdout.readexactly(size)
        except TimeoutError:
            await self._end()
            raise ValueError(f"chat template: it took more than {LIMIT_S:g} s, and was ended") from None
        except (asyncio.IncompleteReadError, OSError):
            await self._end()
            raise ValueError("chat template: it needs more memory or time than a template may have") from None
        outcome = msgspec.msgpack.decode(reply, type=Outcome)
        if outcome.error:
            raise ValueError(outcome.error)
        return outcome.text

    async def _start(self) -> None:
        argv = (sys.executable, "-m", "worker.template_child", str(self._max_chars))
        try:
            async with asyncio.timeout(START_S):
                self._process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
                assert self._process.stdout is not None
                await self._process.stdout.readexactly(len(READY))
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.error("the process for chat templates of requests did not start: %r", error)
            await self._end()
            raise Unavailable("chat templates of requests cannot be run now") from None

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
