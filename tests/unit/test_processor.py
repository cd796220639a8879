"""What tests say of idle processes must not depend on who else runs on the machine."""

import subprocess
import sys
import time

from tests.processor import used

SPIN = "import os, time; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(flush=True)\nwhile True: pass"
DOZE = "import time; print(flush=True)\nwhile True: time.sleep(0.01)"


def test_a_process_that_neighbours_push_off_its_core_does_not_wake():
    with (
        subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) as one,
        subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) as other,
    ):
        try:
            assert one.stdout.readline() == other.stdout.readline() == b"\n"
            before, pushed = used([one.pid]), _pushed_off(one.pid)
            end = time.monotonic() + 60
            while _pushed_off(one.pid) < pushed + 50:
                assert time.monotonic() < end, "they do not share a core"
                time.sleep(0.05)
            assert used([one.pid]).wakes - before.wakes < 10
        finally:
            one.kill()
            other.kill()


def test_a_process_that_sleeps_in_between_wakes():
    with subprocess.Popen([sys.executable, "-c", DOZE], stdout=subprocess.PIPE) as one:
        try:
            one.stdout.readline()
            before, end = used([one.pid]), time.monotonic() + 60
            while used([one.pid]).wakes < before.wakes + 20:
                assert time.monotonic() < end
                time.sleep(0.05)
        finally:
            one.kill()


def _pushed_off(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return sum(int(line.split()[1]) for line in status if line.startswith("nonvoluntary"))
