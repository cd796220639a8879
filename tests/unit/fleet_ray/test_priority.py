"""What runs on a node is not put behind everything else there, as Ray's workers are."""

import os
import subprocess
import sys

import pytest

from fleet_ray import actors


@pytest.fixture(autouse=True)
def nobody_has_chosen(monkeypatch):
    monkeypatch.delenv("RAY_worker_niceness", raising=False)


WORKER = """
import os, threading
from fleet_ray.actors import as_the_node

over = threading.Event()
thread = threading.Thread(target=over.wait)
thread.start()
os.setpriority(os.PRIO_PROCESS, 0, {behind})
os.setpriority(os.PRIO_PROCESS, thread.native_id, {behind})
as_the_node()
print({{os.getpriority(os.PRIO_PROCESS, int(one)) for one in os.listdir("/proc/self/task")}})
over.set()
"""


def _worker():
    code = WORKER.format(behind=min(19, os.getpriority(os.PRIO_PROCESS, 0) + 7))
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=50)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may go before others")
def test_every_thread_has_the_priority_of_the_process_that_started_it():
    assert _worker().stdout.strip() == str({os.getpriority(os.PRIO_PROCESS, 0)})


def test_where_that_is_not_allowed_it_is_said_what_to_do(monkeypatch, caplog):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(actors.os, "getpriority", lambda which, who: 0 if who == os.getppid() else 15)
    monkeypatch.setattr(actors.os, "setpriority", refuse)
    actors.as_the_node()
    assert "RAY_worker_niceness=0" in caplog.text
    assert "15" in caplog.text


def test_who_is_not_behind_is_left_alone(monkeypatch, caplog):
    monkeypatch.setattr(actors.os, "getpriority", lambda which, who: 0)
    monkeypatch.setattr(actors.os, "setpriority", None)
    actors.as_the_node()
    assert caplog.text == ""


def test_a_thread_that_has_just_ended_keeps_no_other_behind(monkeypatch):
    """Numbers of threads rise: one of those behind it starts the ranks."""
    raised = []

    def priority(_, who):
        if who == 1:
            raise ProcessLookupError
        return 0 if who == os.getppid() else 15

    monkeypatch.setattr(actors.os, "listdir", lambda _: ["1", "2"])
    monkeypatch.setattr(actors.os, "getpriority", priority)
    monkeypatch.setattr(actors.os, "setpriority", lambda _, who, wanted: raised.append((who, wanted)))
    actors.as_the_node()
    assert raised == [(2, 0)]


def test_a_niceness_that_somebody_has_chosen_for_workers_stays(monkeypatch):
    monkeypatch.setenv("RAY_worker_niceness", "5")
    monkeypatch.setattr(actors.os, "getpriority", lambda which, who: 0 if who == os.getppid() else 5)
    monkeypatch.setattr(actors.os, "setpriority", None)
    actors.as_the_node()
