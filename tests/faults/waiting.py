"""Bounds on time: every fault has one. They are of a machine with a core to spare, and longer where there is none."""

import os
import time
from collections.abc import Callable
from typing import Any


class Timed:
    """`within(seconds)`: the block must end in time, and the bound is part of the test."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds * (1 + os.getloadavg()[0] / (os.cpu_count() or 1))

    def __enter__(self) -> "Timed":
        self.began = time.monotonic()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        took = time.monotonic() - self.began
        assert kind is not None or took <= self.seconds, f"took {took:.2f} s, bound {self.seconds:.2f} s"


def until(what: Callable[[], Any], seconds: float = 30.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < end, "nothing came of it in time"
        time.sleep(0.01)
    return value
