"""Bounds on time: every fault has one."""

import time
from collections.abc import Callable
from typing import Any


class Timed:
    """`within(seconds)`: the block must end in time, and the bound is part of the test."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> "Timed":
        self.began = time.monotonic()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        took = time.monotonic() - self.began
        assert kind is not None or took <= self.seconds, f"took {took:.2f} s, bound {self.seconds} s"


def until(what: Callable[[], Any], seconds: float = 5.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < end, "nothing came of it in time"
        time.sleep(0.01)
    return value
