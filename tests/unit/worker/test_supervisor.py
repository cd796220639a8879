import asyncio
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import worker.unit
from tests.unit.worker.supervising import QUICK, SLEEP, alive, ask, connects, pids, python, supervise, unit, until
from worker import background
from worker.child import Child
from worker.run_dir import AlreadyRunning, RunDir
from worker.supervisor_messages import (
    GIVEN_UP_FILE,
    Failed,
    GetProcesses,
    Ok,
    Processes,
    Restart,
    Shutdown,
    decode_given_up,
)
from worker.unit import ProcessSpec, RestartPolicy, UnitSpec


@pytest.fixture
def run_dir(tmp_path):
    claimed = RunDir(tmp_path / "run")
    yield claimed
    claimed.close()


@pytest.fixture
def lines():
    return []


def test_a_killed_process_comes_back(run_dir, lines):
    async def script(supervisor):
        await until(lambda: all(pids(supervisor).values()))
        first = pids(supervisor)
        os.kill(first["store"], signal.SIGKILL)
        await until(lambda: pids(supervisor)["store"] not in (None, first["store"]))
        assert pids(supervisor)["api"] == first["api"]
        store = supervisor.units[0].processes()[0]
        assert (store.restarts, store.last_exit) == (1, "killed by SIGKILL")

    assert supervise([unit("store", "store", SLEEP), unit("api", "api", SLEEP)], run_dir, lines, script) == 0


def test_a_replica_is_restarted_whole(run_dir, lines):
    async def script(supervisor):
        await until(lambda: len(pids(supervisor)) == 2 and all(pids(supervisor).values()))
        first = pids(supervisor)
        os.kill(first["replica-0-1"], signal.SIGKILL)
        await until(lambda: all(pid and pid != first[name] for name, pid in pids(supervisor).items()))
        assert not any(alive(pid) for pid in first.values())

    assert supervise([unit("replica-0", "replica", SLEEP, SLEEP)], run_dir, lines, script) == 0


def test_a_crash_leaves_a_readable_report(run_dir, lines):
    async def script(supervisor):
        await until(lambda: list(run_dir.crashes.glob("*.txt")))

    crash = "import sys; print('loading'); sys.exit('no such tensor: lm_head')"
    supervise([unit("store", "store", crash)], run_dir, lines, script)
    report = min(run_dir.crashes.glob("*-store.txt")).read_text()
    assert "exit status 1" in report
    assert report.endswith("loading\nno such tensor: lm_head\n")


def test_a_report_that_cannot_be_written_keeps_nobody_from_coming_back(run_dir, lines, caplog):
    """A full disk says so in the same way: with an OSError."""
    run_dir.crashes.write_text("not a directory")

    async def script(supervisor):
        await until(lambda: all(pids(supervisor).values()))
        first = pids(supervisor)
        os.kill(first["replica-0"], signal.SIGKILL)
        await until(lambda: pids(supervisor)["replica-0"] not in (None, first["replica-0"]))
        assert pids(supervisor)["api"] == first["api"]

    assert supervise([unit("replica-0", "replica", SLEEP), unit("api", "api", SLEEP)], run_dir, lines, script) == 0
    assert "killed by SIGKILL" in caplog.text
    run_dir.crashes.unlink()


def test_a_full_disk_leaves_no_empty_report_in_the_place_of_an_older_one(run_dir, lines, caplog):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def script(supervisor):
        await until(lambda: all(pids(supervisor).values()))
        first = pids(supervisor)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            os.kill(first["replica-0"], signal.SIGKILL)
            await until(lambda: "no report could be written" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert supervise([unit("replica-0", "replica", SLEEP), unit("api", "api", SLEEP)], run_dir, lines, script) == 0
    assert [path for path in run_dir.crashes.iterdir() if not path.stat().st_size] == []


def test_ranks_that_cannot_be_started_are_tried_again_together(run_dir, lines, tmp_path, caplog):
    """The program of one is not there yet; a system without memory or room for a process refuses it in the same way."""
    program = tmp_path / "program"
    ranks = (python("rank-0", SLEEP), ProcessSpec("rank-1", (str(program),)))
    patient = replace(QUICK, give_up=1000)
    started = []

    async def script(supervisor):
        await until(lambda: supervisor.units[0].restarts > 2)
        assert not any(pids(supervisor)[name] for name in ("rank-0", "rank-1"))
        assert pids(supervisor)["api"]
        program.write_text(f"#!{sys.executable}\n{SLEEP}")
        program.chmod(0o700)
        await until(lambda: all(pids(supervisor).values()))
        started.extend(pids(supervisor).values())

    units = [UnitSpec("replica-0", "replica", ranks, patient, stop_s=2.0), unit("api", "api", SLEEP)]
    assert supervise(units, run_dir, lines, script) == 0
    assert started
    assert not any(map(alive, started))
    assert "replica-0 cannot be started" in caplog.text


async def test_a_process_that_was_forked_and_nobody_knows_of_is_ended(monkeypatch):
    """What waits for it to become its program is interrupted: nobody else could end it, or take its exit status."""
    here, read = set(_children()), os.read

    def interrupted(*_):
        monkeypatch.setattr(os, "read", read)
        raise MemoryError

    monkeypatch.setattr(os, "read", interrupted)
    with pytest.raises(MemoryError):
        Child("rank-0", (sys.executable, "-c", SLEEP), os.environ, signal.SIGTERM, lambda *_: None)
    assert set(_children()) == here
    gc.collect()  # a process object that is unfinished warns


def _children():
    """Of this process, those that have ended and that nobody has taken the status of included."""
    for path in Path("/proc/self/task").glob("*/children"):
        yield from path.read_text().split()


def test_what_lies_where_the_service_was_started_is_not_taken_for_ours(run_dir, lines, tmp_path, monkeypatch):
    """A project with modules called worker or json is a place to start from like any other."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worker.py").write_text("raise RuntimeError('not ours')")
    (tmp_path / "json.py").write_text("raise RuntimeError('not ours')")

    async def script(supervisor):
        await until(lambda: len(lines) == 2)

    code = "import json, subprocess, sys, time, worker; print(worker.__doc__, flush=True); {}; time.sleep(60)"
    grandchild = "subprocess.run([sys.executable, '-c', 'import worker; print(worker.__doc__)'])"
    assert supervise([unit("api", "api", code.format(grandchild))], run_dir, lines, script) == 0
    assert len(set(lines)) == 1, lines


def test_a_unit_that_can_never_be_started_is_given_up_in_words(run_dir, lines, tmp_path):
    async def script(supervisor):
        await until(lambda: supervisor.units[0].state == "gave_up")
        assert "store" in supervisor.units[0].why_gave_up

    store = UnitSpec("store", "store", (ProcessSpec("store", (str(tmp_path / "nothing"),)),), QUICK)
    assert supervise([store, unit("api", "api", SLEEP)], run_dir, lines, script) == 1


def test_a_unit_that_keeps_ending_is_given_up_and_the_service_with_it(run_dir, lines):
    async def script(supervisor):
        await until(lambda: supervisor.units[0].state == "gave_up")

    units = [unit("store", "store", "raise SystemExit(3)"), unit("api", "api", SLEEP)]
    assert supervise(units, run_dir, lines, script) == 1


@pytest.mark.parametrize(("status", "tries"), [(1, 2), (2, 1), (78, 1)])
def test_a_first_start_that_says_why_it_cannot_be_is_not_tried_again(run_dir, lines, status, tries):
    """2 and 78 say why. 1 is what Python says of any error that nobody thought of: it is believed the second time."""

    async def script(supervisor):
        await until(lambda: supervisor.units[0].state == "gave_up")
        assert supervisor.units[0].processes()[0].restarts == tries
        assert "cannot start" in supervisor.units[0].why_gave_up

    assert supervise([unit("store", "store", f"raise SystemExit({status})")], run_dir, lines, script) == 1


def test_a_first_start_that_fails_once_is_forgotten(run_dir, lines, tmp_path):
    """A port that somebody else was given meanwhile, memory that another has for a moment: a replica that was given
    up for it was gone for good.
    """
    once = tmp_path / "once"
    code = (
        f"import os, time; failed = os.path.exists({str(once)!r}); open({str(once)!r}, 'w')\n"
        "if not failed: raise MemoryError\n"
        "print('up', flush=True); time.sleep(60)"
    )

    async def script(supervisor):
        await until(lambda: any(line == "up" for _, line in lines))
        assert supervisor.units[0].state == "running"
        assert supervisor.units[0].processes()[0].restarts == 1

    assert supervise([unit("replica-0", "replica", code)], run_dir, lines, script) == 0


def test_starts_that_fail_otherwise_in_between_are_no_second_word(run_dir, lines, tmp_path):
    count = tmp_path / "count"
    code = (
        f"import os, signal, time; open({str(count)!r}, 'a').write('x'); n = os.path.getsize({str(count)!r})\n"
        "if n == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "if n in (1, 3): raise SystemExit(1)\n"
        "print('up', flush=True); time.sleep(60)"
    )

    async def script(supervisor):
        await until(lambda: any(line == "up" for _, line in lines))

    assert supervise([unit("replica-0", "replica", code)], run_dir, lines, script) == 0


@pytest.mark.parametrize("status", [2, 78])
def test_what_has_run_before_is_tried_again_whatever_it_says(run_dir, lines, monkeypatch, status):
    """A port that another has for a moment, a disk that is full: what was right before may be right again."""
    monkeypatch.setattr(worker.unit, "_START_S", 0.1)

    async def script(supervisor):
        await until(lambda: supervisor.units[0].restarts > 2)

    ran = run_dir.path / "ran"
    code = (
        "import pathlib, time; time.sleep(0.2); "
        f"ran = pathlib.Path({str(ran)!r}); first = not ran.exists(); ran.touch(); "
        f"raise SystemExit(3 if first else {status})"
    )
    supervise([unit("api", "api", code, restart=replace(QUICK, give_up=1000))], run_dir, lines, script)


@pytest.mark.parametrize("status", [2, 78])
def test_a_start_that_says_why_it_cannot_be_after_long_has_not_run(run_dir, lines, monkeypatch, status):
    """A store that reads its first weights for an hour, a rank that finds no room for its KV after a minute."""
    monkeypatch.setattr(worker.unit, "_START_S", 0.1)

    async def script(supervisor):
        await until(lambda: supervisor.units[0].state == "gave_up")
        assert supervisor.units[0].restarts == 1
        assert "cannot start" in supervisor.units[0].why_gave_up

    code = f"import time; time.sleep(0.3); raise SystemExit({status})"
    assert supervise([unit("store", "store", code)], run_dir, lines, script) == 1


def test_one_replica_given_up_leaves_the_others_running(run_dir, lines):
    async def script(supervisor):
        await until(lambda: supervisor.units[0].state == "gave_up")
        await asyncio.sleep(0.2)
        assert supervisor.units[1].state == "running"

    units = [unit("replica-0", "replica", "raise SystemExit(1)"), unit("replica-1", "replica", SLEEP)]
    assert supervise(units, run_dir, lines, script) == 0


SLOWLY = replace(QUICK, give_up=1, retry_s=0.3, retry_max_s=1.0)
"""Given up at once, and tried again after this many seconds at first."""


def given_up(run_dir):
    path = run_dir.path / GIVEN_UP_FILE
    return decode_given_up(path.read_bytes()) if path.exists() else {}


def unless(path):
    """A program that goes on once a file is there, and fails without."""
    return f"import pathlib, time; time.sleep(60 if pathlib.Path({str(path)!r}).exists() else 0); raise SystemExit(5)"


def test_what_was_given_up_is_tried_again_seldom_and_may_come_back(run_dir, lines, tmp_path):
    """A card that was away, memory that another had: nobody has to be there when it is mended."""
    mended = tmp_path / "mended"

    async def script(supervisor):
        tried = supervisor.units[0]
        await until(lambda: tried.restarts >= 3)
        await until(lambda: "replica-0" in given_up(run_dir))
        said = given_up(run_dir)["replica-0"]
        assert "ended 1 times" in said.why
        assert said.again_at == tried.again_at > time.time() - 1
        mended.touch()
        await until(lambda: tried.processes()[0].uptime_s > 1)
        assert not given_up(run_dir)
        assert supervisor.units[1].restarts == 0

    units = [
        unit("replica-0", "replica", unless(mended), restart=SLOWLY),
        unit("replica-1", "replica", SLEEP),
    ]
    assert supervise(units, run_dir, lines, script) == 0


def test_the_waits_before_what_was_given_up_is_tried_again_grow_up_to_half_an_hour():
    policy = RestartPolicy()
    assert [policy.retry_delay(times) / 60 for times in range(1, 7)] == [2, 4, 8, 16, 30, 30]
    assert policy.retry_delay(5000) == 1800


def test_what_was_given_up_can_be_started_by_hand(run_dir, lines, tmp_path):
    mended = tmp_path / "mended"

    async def script(supervisor):
        tried = supervisor.units[0]
        await until(lambda: tried.state == "gave_up")
        mended.touch()
        assert isinstance(await ask(run_dir, Restart("c", ["api-1"])), Ok)
        await until(lambda: tried.state == "running")
        assert not given_up(run_dir)

    units = [
        unit("api-1", "api-worker", unless(mended), restart=replace(SLOWLY, retry_s=3000.0)),
        unit("api", "api", SLEEP),
    ]
    assert supervise(units, run_dir, lines, script) == 0


def test_a_service_that_waits_to_try_again_stops_at_once(run_dir, lines):
    async def script(supervisor):
        await until(lambda: supervisor.units[0].state == "gave_up")

    units = [
        unit("replica-0", "replica", "raise SystemExit(5)", restart=replace(SLOWLY, retry_s=3000.0)),
        unit("replica-1", "replica", SLEEP),
    ]
    began = time.monotonic()
    assert supervise(units, run_dir, lines, script) == 0
    assert time.monotonic() - began < 15


def test_an_api_process_that_is_given_up_is_only_missed_and_the_first_takes_all_along(run_dir, lines):
    async def script(supervisor):
        await until(lambda: supervisor.units[0].state == "gave_up")
        await asyncio.sleep(0.2)
        assert supervisor.units[1].state == "running"

    units = [unit("api-1", "api-worker", "raise SystemExit(1)"), unit("api", "api", SLEEP)]
    assert supervise(units, run_dir, lines, script) == 0
    units = [unit("api", "api", "raise SystemExit(1)"), unit("api-1", "api-worker", SLEEP)]

    async def watch(supervisor):
        await until(lambda: supervisor.units[0].state == "gave_up")

    assert supervise(units, run_dir, lines, watch) == 1


def test_the_end_comes_in_order_and_the_stubborn_are_killed(run_dir, lines):
    polite = (
        "import signal, sys, time\n"
        "def end(*_): print('bye', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('up', flush=True); time.sleep(60)"
    )
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )

    async def script(supervisor):
        await until(lambda: sum(line == "up" for _, line in lines) == 3)

    units = [
        unit("store", "store", polite),
        unit("replica-0", "replica", stubborn, stop_s=0.5),
        unit("api", "api", polite),
    ]
    began = time.monotonic()
    assert supervise(units, run_dir, lines, script) == 0
    assert [name for name, line in lines if line == "bye"] == ["api", "store"]
    assert time.monotonic() - began < 10


def test_ranks_whose_first_has_ended_are_not_waited_for(run_dir, lines):
    """One stopped while it was starting: rank 0 is gone, and the others would wait for it to join them."""
    polite = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0));"
        "print('up', flush=True); time.sleep(60)"
    )
    waits = "print('up', flush=True); import time; time.sleep(60)"

    async def script(supervisor):
        await until(lambda: sum(line == "up" for _, line in lines) == 2)

    began = time.monotonic()
    assert supervise([unit("replica-0", "replica", polite, waits, stop_s=15.0)], run_dir, lines, script) == 0
    assert time.monotonic() - began < 10


def test_status_bad_bytes_and_shutdown_over_the_socket(run_dir, lines):
    async def script(supervisor):
        await until(lambda: all(pids(supervisor).values()))
        status = await ask(run_dir, GetProcesses("c1"))
        assert isinstance(status, Processes)
        assert (status.call, status.pid, status.items[0].pid) == ("c1", os.getpid(), pids(supervisor)["store"])
        for unreadable in (b"\xff nonsense", b"\x82\xa1t\xa7restart\xa4call\xa2\xff\xfe"):
            assert isinstance(await ask(run_dir, unreadable), Failed)
        assert isinstance(await ask(run_dir, Restart("c2", ["nobody"])), Failed)
        assert await ask(run_dir, Shutdown("c3")) == Ok("c3")

    assert supervise([unit("store", "store", SLEEP)], run_dir, lines, script) == 0


def test_a_restart_that_fails_in_a_way_nobody_thought_of_is_answered(run_dir, lines, monkeypatch):
    """Whoever asked waits for minutes otherwise, and knows no more then."""

    async def fails(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("worker.supervisor.restart_units", fails)

    async def script(supervisor):
        await until(lambda: all(pids(supervisor).values()))
        for call in ("c1", "c2"):
            answer = await ask(run_dir, Restart(call, ["store"]))
            assert isinstance(answer, Failed)
            assert (answer.call, "Too many open files" in answer.message) == (call, True)

    assert supervise([unit("store", "store", SLEEP)], run_dir, lines, script) == 0


def test_restart_of_a_unit_is_not_counted_as_a_failure(run_dir, lines):
    async def script(supervisor):
        await until(lambda: all(pids(supervisor).values()))
        first = pids(supervisor)["api"]
        for _ in range(5):  # more than the policy's failures
            assert isinstance(await ask(run_dir, Restart("r", ["api"])), Ok)
        await until(lambda: pids(supervisor)["api"] not in (None, first))
        assert supervisor.units[0].state == "running"
        assert not run_dir.crashes.exists()

    polite = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(60)"
    assert supervise([unit("api", "api", polite)], run_dir, lines, script) == 0


LISTENS = """
import os, socket, sys, time
time.sleep({first})
try:
    os.unlink({path!r})
except FileNotFoundError:
    pass
server = socket.socket(socket.AF_UNIX)
server.bind({path!r})
server.listen()
time.sleep(60)
"""


def test_a_restart_is_over_when_the_unit_listens_again(run_dir, lines):
    """Else the next of several API processes would be ended while the first is not there yet: nobody would answer."""

    async def script(supervisor):
        for name in ("api", "api-1"):
            await until(lambda name=name: connects(run_dir.path / f"{name}.sock"))
        restarting = asyncio.create_task(ask(run_dir, Restart("r", ["api", "api-1"])))
        while not restarting.done():
            assert any(connects(run_dir.path / f"{name}.sock") for name in ("api", "api-1")), "nobody listens"
            await asyncio.sleep(0.01)
        assert await restarting == Ok("r")
        assert [u.restarts for u in supervisor.units] == [1, 1]
        assert connects(run_dir.path / "api-1.sock")

    units = []
    for name, kind in (("api", "api"), ("api-1", "api-worker")):
        code = LISTENS.format(first=0.7, path=str(run_dir.path / f"{name}.sock"))
        units.append(unit(name, kind, code, listens=f"{name}.sock"))
    assert supervise(units, run_dir, lines, script) == 0


def test_status_and_restarts_are_there_again_after_they_failed(run_dir, lines, monkeypatch):
    """Else they would hang without a word for as long as the service runs."""
    monkeypatch.setattr(background, "AGAIN_S", 0.01)

    async def script(supervisor):
        answer, failures = supervisor._answer, []

        def failing_once(*call):
            if not failures:
                failures.append(call)
                raise OSError(24, "Too many open files")
            return answer(*call)

        monkeypatch.setattr(supervisor, "_answer", failing_once)
        unheard = asyncio.create_task(ask(run_dir, GetProcesses("a")))
        await until(lambda: failures)
        assert isinstance(await ask(run_dir, GetProcesses("b")), Processes)
        unheard.cancel()
        await asyncio.gather(unheard, return_exceptions=True)

    assert supervise([unit("store", "store", SLEEP)], run_dir, lines, script) == 0


def test_a_restart_of_what_does_not_listen_again_says_so(run_dir, lines):
    async def script(supervisor):
        await until(lambda: all(pids(supervisor).values()))
        refused = await ask(run_dir, Restart("r", ["store"], ready_s=0.5))
        assert refused == Failed("r", "store: not ready 0.5 s after its start")

    assert supervise([unit("store", "store", SLEEP, listens="store.sock")], run_dir, lines, script) == 0


def test_a_restart_with_times_that_are_none_is_refused(run_dir, lines):
    """What waits for not a number seconds waits for ever, and no other restart begins."""

    async def script(supervisor):
        await until(lambda: all(pids(supervisor).values()))
        for times in ({"drain_s": float("nan")}, {"drain_s": -1.0}, {"ready_s": float("inf")}):
            refused = await ask(run_dir, Restart("r", ["api"], **times))
            assert isinstance(refused, Failed)
            assert next(iter(times)) in refused.message
        assert supervisor.units[0].restarts == 0

    assert supervise([unit("api", "api", SLEEP)], run_dir, lines, script) == 0


def test_a_child_that_never_stops_writing_leaves_the_loop_to_others(run_dir):
    async def script(supervisor):
        await until(lambda: all(pids(supervisor).values()))
        assert isinstance(await ask(run_dir, GetProcesses("c")), Processes)

    wordy = UnitSpec("store", "store", (ProcessSpec("store", ("yes",)),), QUICK, stop_s=2.0)
    assert supervise([wordy], run_dir, deque(maxlen=10), script) == 0


def test_every_start_of_a_unit_gets_an_environment_of_its_own(run_dir, lines):
    count = iter(range(100))

    async def script(supervisor):
        await until(lambda: ("api", "1") in lines)

    show = "import os, time; print(os.environ['PORT'], flush=True); raise SystemExit(3)"
    spec = unit("api", "api", show, incarnation=lambda: [{"PORT": str(next(count))}])
    supervise([spec], run_dir, lines, script)
    assert lines[:2] == [("api", "0"), ("api", "1")]


def test_a_second_service_of_the_same_name_is_told_so(run_dir):
    with pytest.raises(AlreadyRunning, match=rf"pid {os.getpid()}.*--name"):
        RunDir(run_dir.path)


def test_a_run_directory_is_cleaned_when_claimed_and_when_left(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "lock").touch()
    (path / "replica-3.sock").touch()
    claimed = RunDir(path)
    assert not (path / "replica-3.sock").exists()
    assert path.stat().st_mode & 0o077 == 0 or path.stat().st_mode & 0o777 == 0o755  # made by the test here
    (path / "config.json").touch()
    claimed.close()
    assert not path.exists()
    RunDir(path).close()


def test_children_do_not_outlive_a_killed_supervisor(tmp_path):
    code = f"""
import sys
from worker.run_dir import RunDir
from worker.supervisor import Supervisor
from worker.unit import ProcessSpec, UnitSpec
import signal
child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
spec = lambda n, s: ProcessSpec(n, (sys.executable, "-c", child), death_signal=s)
units = [UnitSpec("store", "store", (spec("store", signal.SIGTERM),)),
         UnitSpec("replica-0", "replica", (spec("a", signal.SIGKILL), spec("b", signal.SIGKILL)))]
sys.exit(Supervisor(units, RunDir(__import__("pathlib").Path({str(tmp_path / "run")!r}))).run())
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as supervisor:
        children = [int(supervisor.stderr.readline()) for _ in range(3)]
        assert all(alive(pid) for pid in children)
        supervisor.kill()
        supervisor.wait(30)
        deadline = time.monotonic() + 30
        while any(alive(pid) for pid in children):
            assert time.monotonic() < deadline, "a child outlived its supervisor"
            time.sleep(0.02)
    RunDir(tmp_path / "run").close()  # the lock went with it


@pytest.mark.parametrize(
    ("number", "ignored", "ends"),
    [(signal.SIGTERM, False, True), (signal.SIGHUP, False, True), (signal.SIGHUP, True, False)],
)
def test_a_signal_ends_everything_in_order_unless_it_was_ignored_before(tmp_path, number, ignored, ends):
    """SIGHUP comes when a terminal is closed; `nohup` has it ignored."""
    code = f"""
import signal, sys, pathlib
signal.signal(signal.SIGHUP, signal.SIG_IGN if {ignored} else signal.SIG_DFL)
from worker.run_dir import RunDir
from worker.supervisor import Supervisor
from worker.unit import ProcessSpec, UnitSpec
child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
units = [UnitSpec("store", "store", (ProcessSpec("store", (sys.executable, "-c", child)),))]
run_dir = RunDir(pathlib.Path({str(tmp_path / "run")!r}))
status = Supervisor(units, run_dir).run()
run_dir.close()
sys.exit(status)
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as supervisor:
        child = int(supervisor.stderr.readline())
        supervisor.send_signal(number)
        if not ends:
            with pytest.raises(subprocess.TimeoutExpired):
                supervisor.wait(0.5)
            supervisor.terminate()
        assert supervisor.wait(10) == 0
        assert not alive(child)
    assert not (tmp_path / "run").exists()


UNREAD = """
import sys
from pathlib import Path
from tests.unit.worker.supervising import QUICK, python
from weight_manager.logs import setup
from worker.run_dir import RunDir
from worker.supervisor import STDERR, Supervisor
from worker.unit import UnitSpec
setup("serve", lines=STDERR)
chatty = "while True: print('x' * 1000, flush=True)"
units = [UnitSpec(name, name, (python(name, code),), QUICK, 2.0) for name, code in
         (("store", chatty), ("api", "import time; time.sleep(60)"))]
Supervisor(units, RunDir(Path(sys.argv[1]))).run()
"""


async def test_what_runs_is_watched_though_nobody_reads_what_is_said(tmp_path):
    """A terminal that is stopped, or a collector of logs that hangs: the pipe is full after 64 KiB."""
    where = SimpleNamespace(path=tmp_path / "run")
    with subprocess.Popen([sys.executable, "-c", UNREAD, str(where.path)], stderr=subprocess.PIPE) as process:  # noqa: ASYNC220
        try:
            await until(lambda: connects(where.path / "supervisor.sock"))
            before = {one.name: one.pid for one in (await ask(where, GetProcesses("a"))).items}
            await asyncio.sleep(0.5)  # of output
            os.kill(before["api"], signal.SIGKILL)
            await asyncio.sleep(0.5)
            after = {one.name: one.pid for one in (await ask(where, GetProcesses("b"))).items}
            assert after["store"] == before["store"]
            assert after["api"] not in (None, before["api"])
        finally:
            process.terminate()
            process.stderr.read()


async def test_work_that_goes_on_failing_is_said_once_and_rests_longer(monkeypatch, caplog):
    monkeypatch.setattr(background, "AGAIN_S", 0.01)
    tries = []

    async def fails():
        tries.append(1)
        raise OSError("Address already in use")

    task = asyncio.create_task(background.kept("status", fails))
    await asyncio.sleep(1.0)
    task.cancel()
    assert 2 <= len(tries) < 12, "a hundred would fit"
    assert [record.exc_info is not None for record in caplog.records] == [True, *[False] * (len(tries) - 1)]
