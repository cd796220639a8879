"""Scripts that run in forks of a process which has loaded Paddle: a start costs milliseconds, not seconds of a core.

Nothing has computed in that process when it forks, so it has no thread that a fork would lack.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
Script = tuple[Path, Sequence[str], dict[str, str]]
"""Its file, its arguments, and what its environment has beside ours."""


class Forking:
    """A process that has loaded these modules. environment: beside ours, of it and of all its forks."""

    def __init__(self, modules: Sequence[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.forked", *modules],
            env={**os.environ, **environment},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, scripts: Sequence[Script], timeout_s: float) -> list[str]:
        """What these print, which run at once. Raises AssertionError when one fails, or takes longer."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        print(json.dumps([[(str(script), *rest) for script, *rest in scripts], timeout_s]), file=stdin, flush=True)
        statuses, outs = json.loads(stdout.readline())
        assert statuses == [0] * len(scripts)
        return list(outs)

    def close(self) -> None:
        """End it, and whatever still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def _fork(script: str, words: list[str], environment: dict[str, str], out: int) -> int:
    """The process that runs it."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.dup2(out, 1)
        os.environ.update(environment)
        sys.argv = [script, *words]
        runpy.run_path(script, run_name="__main__")
        sys.stdout.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _statuses(pids: list[int], timeout_s: float) -> list[int]:
    """Of these processes, which are ended when the time is up."""
    end, found = time.monotonic() + timeout_s, dict[int, int]()
    while len(found) < len(pids):
        for pid in pids:
            if pid not in found and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                found[pid] = os.waitstatus_to_exitcode(ended[1])
            elif pid not in found and time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [found[pid] for pid in pids]


def main() -> None:
    """Load what is named, then run what stdin asks for, line by line."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        scripts, timeout_s = json.loads(line)
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, "a fork would lack threads"
        with contextlib.ExitStack() as stack:
            files: list[Any] = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in scripts]
            pids = [_fork(*script, file.fileno()) for script, file in zip(scripts, files, strict=True)]
            statuses = _statuses(pids, timeout_s)
            for file in files:
                file.seek(0)
            print(json.dumps([statuses, [file.read() for file in files]]), flush=True)


if __name__ == "__main__":
    main()
