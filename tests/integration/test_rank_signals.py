"""SIGTERM while a process of a replica starts: Paddle's import puts a handler on it that aborts the process."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reference.checkpoint import Checkpoint

PADDLES_HANDLER = "Termination signal"
TOLD_AFTER_THE_IMPORT = """
import builtins, os, signal, sys

importing, deep = builtins.__import__, 0

def watched(name, *rest, **more):
    global deep
    of_paddle = name.split(".")[0] == "paddle"
    deep += of_paddle
    try:
        return importing(name, *rest, **more)
    finally:
        deep -= of_paddle
        if of_paddle and deep == 0:
            builtins.__import__ = importing
            print("imported", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)

builtins.__import__ = watched
from worker.__main__ import main

status = main()
sys.stdout.flush()
os._exit(status)
"""
SPARE_TOLD_TO_STOP = """
import os, signal, sys
from pathlib import Path
from worker.spare import wait

wait(Path(sys.argv[1]))
print("told", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture
def config(tiny: Checkpoint, tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"worker": {"model_dir": str(tiny.directory)}}))
    return path


def run(program: str, *arguments: str, word: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, input=word, capture_output=True, text=True, check=False, timeout=60)


def test_sigterm_during_a_start_waits_for_the_loop_which_drains(config: Path) -> None:
    done = run(TOLD_AFTER_THE_IMPORT, "--config", str(config), "--replica", "0")
    assert done.stdout.startswith("imported"), done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert PADDLES_HANDLER not in done.stdout + done.stderr


def test_sigterm_ends_a_spare_quietly(config: Path) -> None:
    done = run(SPARE_TOLD_TO_STOP, str(config), word=json.dumps({"argv": ["worker"], "env": {}}) + "\n")
    assert done.stdout.startswith("told"), done.stderr
    assert done.returncode == -signal.SIGTERM
    assert PADDLES_HANDLER not in done.stdout + done.stderr
