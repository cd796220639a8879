"""However a store is to end, it ends in time and its arena with it: told to, orphaned, held up, or still starting."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from weight_manager.ending import ASKED_S, ORPHANED_S
from worker.unit import UnitSpec

PARENT = """
    import asyncio, os, signal, sys
    from worker.child import Child

    def output(name, line):
        print(line, file=sys.stderr)

    async def main():
        child = Child("store", sys.argv[1:], os.environ, signal.SIGTERM, output)
        print(child.pid, flush=True)
        await child.wait()

    asyncio.run(main())
"""
HELD = """
    import functools, sys, time
    from weight_manager import __main__, store

    def held(self, now):  # as on a disk that does not answer
        (self._config.run_dir / "held").touch()
        time.sleep(600)

    store.Store._expire = held
    __main__.Ending = functools.partial(__main__.Ending, asked_s=2.0)
    sys.exit(__main__.main())
"""
DEAF = """
    import ctypes, sys
    from weight_manager import __main__, logs
    __main__.ctypes = None  # no death signal from the kernel
    __main__._keep_frame_buffers = lambda: None
    class Libc:
        CDLL = staticmethod(lambda name: Libc)
        prctl = staticmethod(lambda *_: ctypes.CDLL(None).prctl(1, 0))
    __main__.ctypes = Libc
    sys.exit(__main__.main())
"""


class Orphan:
    """A store below a parent that starts it as the supervisor does; `orphan` kills the parent."""

    def __init__(self, directory: Path, model: Path, code: str = "") -> None:
        self.directory = directory
        self.arena_dir = directory / "arena"
        self.arena_dir.mkdir(parents=True)
        part = {"name": "t", "run_dir": str(directory), "model": str(model), "arena_dir": str(self.arena_dir)}
        config = directory / "config.json"
        config.write_text(json.dumps({"store": part | {"push_endpoint": "tcp://127.0.0.1:*"}}))
        program = ["-c", textwrap.dedent(code)] if code else ["-m", "weight_manager"]
        command = [sys.executable, "-c", textwrap.dedent(PARENT), sys.executable, *program, "--config", str(config)]
        self.log = (directory / "log").open("wb")
        self.parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log)
        assert self.parent.stdout is not None
        self.pid = int(self.parent.stdout.readline())
        self.pidfd = os.pidfd_open(self.pid)

    def wait(self, path: str) -> None:
        end = time.monotonic() + 20
        while not (self.directory / path).exists():
            assert time.monotonic() < end, (self.directory / "log").read_text()
            time.sleep(0.01)

    def orphan(self) -> None:
        self.parent.kill()
        self.parent.wait(10)

    def gone_after(self, limit_s: float) -> float:
        """Seconds until it has ended."""
        began = time.monotonic()
        while time.monotonic() < began + limit_s:
            if self._ended():
                return time.monotonic() - began
            time.sleep(0.01)
        raise AssertionError(f"still there after {limit_s} s:\n{(self.directory / 'log').read_text()[-2000:]}")

    def _ended(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    def close(self) -> None:
        if not self._ended():
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.close(self.pidfd)
        if self.parent.poll() is None:
            self.parent.kill()
        self.parent.wait(10)
        assert self.parent.stdout is not None
        self.parent.stdout.close()
        self.log.close()


@pytest.fixture
def orphan(tmp_path, model):
    made = []

    def start(code=""):
        made.append(Orphan(tmp_path / f"o{len(made)}", model, code))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_an_orphaned_store_ends_at_whatever_moment(orphan):
    """Also while it starts: then there may be nothing to remove yet, and nothing is left either."""
    for moment in ("config.json", "store.lock", "arena", "push_endpoint", "weights.json", "push_endpoint"):
        one = orphan()
        one.wait(moment)
        one.orphan()
        one.gone_after(ORPHANED_S + 2)
        left = [path for path in one.arena_dir.iterdir() if moment == "push_endpoint"]
        assert not left, f"left behind by one that was orphaned at {moment}"


@pytest.mark.parametrize("code", [HELD, DEAF], ids=["its loop does not turn", "the kernel's signal was lost"])
def test_an_orphan_ends_by_a_deadline(orphan, code):
    one = orphan(code)
    one.wait("held" if code == HELD else "push_endpoint")
    one.orphan()
    one.gone_after(ORPHANED_S + 2)
    assert not list(one.arena_dir.iterdir())


def test_one_that_is_told_to_and_cannot_ends_before_it_would_be_killed(orphan):
    assert UnitSpec("store", "store", ()).stop_s > ASKED_S, "the supervisor's patience"
    one = orphan(HELD)
    one.wait("held")
    signal.pidfd_send_signal(one.pidfd, signal.SIGTERM)
    assert one.gone_after(4) > 1.5
    assert not list(one.arena_dir.iterdir())
