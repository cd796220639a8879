"""Ranks in waiting: they have loaded Paddle already and become any rank as soon as they are told which.

Loading Paddle is most of what a restarted rank takes. A spare is started once the service has been left alone for a
while, so that it takes no processor from a start or a restart, and is used up by the next one.
"""

import asyncio
import json
import logging
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from worker.child import Child, Output

log = logging.getLogger(__name__)

CALM_S = 8.0
"""After any start, until a spare is made: about what a start takes."""
_LOOK_S = 1.0
_TRIES, _WITHIN_S = 3, 600.0
"""After so many spares that ended before they were needed, within so many seconds, none is made for as long again."""


class Spares:
    """`count` processes of `argv`. `run` makes them; until it has, every start is an ordinary one.

    why_gave_up: why none is made until again_at, by `time.time()`; "" = they are. changed: called when that changes.
    """

    def __init__(self, argv: Sequence[str], count: int, output: Output, *, calm_s: float = CALM_S) -> None:
        self.why_gave_up = ""
        self.again_at = 0.0
        self.changed: Callable[[], None] = lambda: None
        self._argv = tuple(argv)
        self._count = count
        self._output = output
        self._calm_s = calm_s
        self._not_before = time.monotonic() + calm_s
        self._waiting: list[Child] = []
        self._lost: deque[float] = deque(maxlen=_TRIES)  # when the last ones ended before they were needed

    @property
    def pids(self) -> list[int]:
        """Processes of the spares that wait."""
        return [child.pid for child in self._waiting if child.status is None]

    def disturb(self) -> None:
        """Something starts: whoever has to be made waits."""
        self._not_before = time.monotonic() + self._calm_s

    def take(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> Child | None:
        """One that becomes the process of this command line and environment; None when none waits."""
        self._forget_ended()
        word = json.dumps({"argv": list(argv), "env": dict(env)})
        while self._waiting:
            child = self._waiting.pop(0)
            if child.become(name, word):
                return child
        return None

    async def run(self) -> None:
        """Make what is missing, one at a time, while nothing is being started. Until cancelled."""
        while True:
            now = time.monotonic()
            if self._given_up():
                self.why_gave_up = f"{_TRIES} spare processes ended before they were needed"
                self.again_at = time.time() + _WITHIN_S
                log.error("%s: none for %g s", self.why_gave_up, _WITHIN_S)
                self.changed()
                await asyncio.sleep(_WITHIN_S)  # whatever they lack, memory for instance, may be there by then
                self._lost.clear()
                self.why_gave_up = ""
                self.changed()
            elif now < self._not_before:
                await asyncio.sleep(self._not_before - now)
            elif len(self._waiting) < self._count:
                name = f"spare-{len(self._waiting)}"
                try:
                    child = Child(name, self._argv, os.environ, signal.SIGKILL, self._output, told=True)
                except (OSError, subprocess.SubprocessError) as error:  # no memory for a process: tried again later
                    log.warning("a spare process cannot be started: %s", error)
                else:
                    self._waiting.append(child)
                self.disturb()  # from now on: a fork beside a full memory may have taken longer than that
            else:
                await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """End those that wait."""
        for child in self._waiting:
            child.send(signal.SIGKILL)
        for child in self._waiting:
            await child.wait()

    def _given_up(self) -> bool:
        self._forget_ended()
        return len(self._lost) == _TRIES and self._lost[-1] - self._lost[0] < _WITHIN_S

    def _forget_ended(self) -> None:
        for child in [child for child in self._waiting if child.status is not None]:
            self._waiting.remove(child)
            self._lost.append(time.monotonic())
            last = child.lines[-1] if child.lines else "it said nothing"
            log.warning("a spare process ended before it was needed: %s", last)
