"""The demo in short: every step pushes, every logprob fits its version, what is scored again has the bits of sampling,
and Ctrl-C leaves nothing.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.products import ONE_ORDER

COMMAND = [sys.executable, "-m", "examples.grpo_paddle", "--steps"]
PATIENCE_S = 240.0


def left_by(pid: int) -> list[str]:
    """Shared memory and processes of the service that this trainer started."""
    name = f"grpo-demo-{pid}"
    left = [path.name for path in Path("/dev/shm").iterdir() if f"{name}-" in path.name]
    return left + subprocess.run(["pgrep", "-f", name], capture_output=True, text=True, check=False).stdout.split()


def six_steps(out: Path) -> int:
    """Run them; how many answers hold tokens of more than one version."""
    trainer = subprocess.Popen([*COMMAND, "6", "--out", str(out)], stdout=subprocess.PIPE, text=True)
    output = trainer.communicate(timeout=110)[0]
    assert trainer.returncode == 0, output
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == summary["versions_pushed"] == 6
    assert summary["logprob_gap_max"] < 1e-4
    assert summary["answers_rescored"] > 0
    assert summary["answers_rescored_unequal"] == 0 or not ONE_ORDER
    assert (out / "reward.png").exists()
    assert not left_by(trainer.pid)
    return int(summary["answers_of_mixed_versions"])


@pytest.mark.timeout(PATIENCE_S + 120)
def test_a_few_steps(tmp_path: Path) -> None:
    """Where a push lands is chance: in 16 to 156 of the answers of a run of two seconds, on a busy machine in none, and
    the demo is run again.
    """
    deadline = time.monotonic() + PATIENCE_S
    for run in itertools.count():
        if six_steps(tmp_path / str(run)):
            return
        assert time.monotonic() < deadline, f"no push landed inside an answer of {run + 1} runs"


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    trainer = subprocess.Popen(
        ["env", "--default-signal=INT", *COMMAND, "500", "--out", str(tmp_path)],  # a script's background ignores it
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert trainer.stdout is not None
    line = ""
    while "serving at" not in line:
        line = trainer.stdout.readline()
        assert line, "it ended early"
    time.sleep(0.5)
    assert left_by(trainer.pid)
    os.killpg(trainer.pid, signal.SIGINT)  # what a terminal does
    trainer.communicate(timeout=30)
    assert trainer.returncode == 130
    assert not left_by(trainer.pid)
