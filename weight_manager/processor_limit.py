"""A bound on work whose length others decide, as matching their regular expressions: `re` looks for signals as it goes.

Main thread only, as Python handles signals there.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_LOOK_S = 0.1
"""Seconds of the whole process's processor time between two looks at the clock."""


class OverLimit(Exception):
    """The work took longer than it may."""


@contextmanager
def processor_limit(seconds: float) -> Iterator[None]:
    """Raises OverLimit inside the body, wherever it is, once it has had so much processor time of this thread.

    In a callback that Python's own code calls, as of a weak reference, Python only writes it to stderr: it is raised
    again at the next look.
    """
    end = time.thread_time() + seconds
    inside = True

    def look(number: int, frame: FrameType | None) -> None:
        if inside and time.thread_time() > end:
            raise OverLimit(f"it took more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, min(_LOOK_S, seconds), _LOOK_S)
    try:
        yield
    finally:
        inside = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
