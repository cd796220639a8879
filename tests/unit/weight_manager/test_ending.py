"""What the store's process must not leave behind, in a process of its own: it ends by itself."""

import subprocess
import sys

PROGRAM = """
import os, sys, time
from pathlib import Path
from weight_manager.ending import Ending

folder = Path(sys.argv[1])
ending = Ending(os.getppid(), asked_s=0.0)
for number in range(100):  # adapters of one shape after the other, each in an arena of its own
    arena = folder / f"{number}.arena"
    arena.touch()
    ending.made(arena)
    if number % 10:
        arena.unlink()
print(len(ending.arenas), flush=True)
ending.begin()
time.sleep(60.0)
"""


def test_arenas_that_are_gone_are_forgotten_and_the_others_do_not_outlive_the_process(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 1
    assert "did not end within 0 s" in ended.stderr
    assert int(ended.stdout) <= 11, "ten are there, and one may have gone since"
    assert list(tmp_path.iterdir()) == []
