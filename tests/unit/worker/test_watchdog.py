"""A rank that moves lives, however long it takes; one that does not, ends and shows where it stood."""

import subprocess
import sys
import time

import pytest

WATCHED = """
import ctypes, time
from worker.watchdog import Watchdog
watchdog = Watchdog(0.6)
watchdog.start()
def moving(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.05)
        watchdog.moved()
def spins():
    while True:
        pass
def holds_the_lock():
    ctypes.PyDLL(None).sleep(60)
"""


def run(code: str) -> tuple[int, str, float]:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", WATCHED + code], capture_output=True, text=True, timeout=30, check=False
    )
    return done.returncode, done.stderr, time.monotonic() - began


def test_whoever_moves_lives():
    assert run("moving(3.0)")[:2] == (0, "")


@pytest.mark.parametrize("hangs", ["spins", "holds_the_lock"])
def test_whoever_hangs_ends_and_shows_where(hangs):
    status, said, seconds = run(f"moving(1.0)\n{hangs}()")
    assert status == 1
    assert f"in {hangs}" in said
    assert seconds < 20
