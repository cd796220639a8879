"""Processes in waiting: they become what they are told, once there is time to make them, and leave nothing behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

import worker.spares
from tests.unit.worker.supervising import QUICK, SLEEP, alive, pids, until
from worker.run_dir import RunDir
from worker.spares import Spares
from worker.supervisor import Supervisor
from worker.supervisor_messages import GIVEN_UP_FILE, SPARES, decode_given_up
from worker.unit import ProcessSpec, UnitSpec

WAITS = """
import json, os, sys, time
print("loaded", flush=True)
word = json.loads(sys.stdin.readline() or "{}")
if word:
    os.environ.update(word["env"])
    print("is", *word["argv"], os.environ["PLACE"], flush=True)
    time.sleep(60)
"""


def replica(number, ranks):
    specs = tuple(
        ProcessSpec(f"rank-{rank}", (sys.executable, "-c", SLEEP, str(rank)), death_signal=signal.SIGKILL, spare=True)
        for rank in range(ranks)
    )
    return UnitSpec(
        f"replica-{number}", "replica", specs, QUICK, 2.0, lambda: [{"PLACE": f"place {r}"} for r in range(ranks)]
    )


@pytest.fixture
def play(tmp_path):
    """Run a script beside a supervisor with spares; everything it started must be gone afterwards."""
    lines = []
    claimed = RunDir(tmp_path / "run")

    def run(units, count, script, code=WAITS, calm_s=0.3):
        def said(name, line):
            lines.append((name, line))

        spares = Spares((sys.executable, "-c", code), count, said, calm_s=calm_s)
        supervisor = Supervisor(units, claimed, said, spares)

        async def main():
            running = asyncio.create_task(supervisor.main())
            await asyncio.sleep(0.05)
            try:
                await asyncio.wait_for(script(supervisor, spares, lines), 20)
                last = [*spares.pids, *filter(None, pids(supervisor).values())]
            finally:
                supervisor._stop.set()
                assert await asyncio.wait_for(running, 20) == 0
            assert not [pid for pid in last if alive(pid)]

        asyncio.run(main())

    yield run
    claimed.close()


def test_a_whole_replica_comes_back_out_of_spares(play):
    async def script(supervisor, spares, lines):
        await until(lambda: len([line for _, line in lines if line == "loaded"]) == 2)
        waiting, first = spares.pids, pids(supervisor)
        os.kill(first["rank-1"], signal.SIGKILL)
        await until(lambda: sorted(pids(supervisor).values(), key=str) == sorted(waiting))
        await until(lambda: len([line for _, line in lines if line.startswith("is")]) == 2)
        assert {name: line.split()[-3:] for name, line in lines if line.startswith("is")} == {
            "rank-0": ["0", "place", "0"],
            "rank-1": ["1", "place", "1"],
        }
        assert all(process.uptime_s < 5 for process in supervisor.units[0].processes())
        await until(lambda: len(spares.pids) == 2)  # new ones
        assert not set(spares.pids) & set(waiting)

    play([replica(0, 2)], 2, script)


def test_without_a_spare_a_rank_starts_as_ever(play):
    async def script(supervisor, spares, lines):
        await until(lambda: len(spares.pids) == 1)
        (waiting,) = spares.pids
        os.kill(pids(supervisor)["rank-0"], signal.SIGKILL)
        await until(lambda: pids(supervisor)["rank-0"] == waiting)
        assert None not in pids(supervisor).values()
        assert pids(supervisor)["rank-1"] != waiting

    play([replica(0, 2)], 1, script)


def test_a_dead_spare_is_not_taken_and_is_replaced(play):
    async def script(supervisor, spares, lines):
        await until(lambda: len(spares.pids) == 1)
        (dead,) = spares.pids
        os.kill(dead, signal.SIGKILL)
        await until(lambda: dead not in spares.pids)  # one that dies as it is taken is a restart more
        os.kill(pids(supervisor)["rank-0"], signal.SIGKILL)
        await until(lambda: supervisor.units[0].restarts == 1 and pids(supervisor)["rank-0"])
        assert pids(supervisor)["rank-0"] != dead
        await until(lambda: spares.pids and spares.pids != [dead])

    play([replica(0, 1)], 1, script)


def test_spares_that_cannot_load_are_given_up(play):
    async def script(supervisor, spares, lines):
        await until(lambda: len([line for _, line in lines if "no Paddle" in line]) == 3)
        await asyncio.sleep(0.5)
        assert spares.pids == []
        assert len([line for _, line in lines if "no Paddle" in line]) == 3

    play([replica(0, 1)], 1, script, code="raise SystemExit('no Paddle here')", calm_s=0.05)


def test_spares_that_were_given_up_are_tried_again_later(play, monkeypatch, caplog):
    """Whoever was short of memory for ten minutes has some in the weeks after."""
    monkeypatch.setattr(worker.spares, "_WITHIN_S", 4.0)

    async def script(supervisor, spares, lines):
        for lost in range(3):
            await until(lambda lost=lost: len([line for _, line in lines if line == "loaded"]) == lost + 1)
            os.kill(spares.pids[0], signal.SIGKILL)
        await until(lambda: "3 spare processes ended before they were needed: none for 4 s" in caplog.text)
        assert spares.pids == []
        await until(lambda: spares.pids)

    play([replica(0, 1)], 1, script, calm_s=0.05)


def test_spares_that_are_lost_now_and_then_are_made_again(play, monkeypatch):
    """In weeks somebody short of memory ends three of them; each restart after that would load Paddle anew."""
    monkeypatch.setattr(worker.spares, "_WITHIN_S", 0.1)

    async def script(supervisor, spares, lines):
        for lost in range(4):
            await until(lambda lost=lost: len([line for _, line in lines if line == "loaded"]) == lost + 1)
            await asyncio.sleep(0.15)
            os.kill(spares.pids[0], signal.SIGKILL)
        await until(lambda: len([line for _, line in lines if line == "loaded"]) == 5)

    play([replica(0, 1)], 1, script, calm_s=0.05)


def test_nothing_is_made_while_something_starts(play):
    async def script(supervisor, spares, lines):
        for _ in range(4):
            await asyncio.sleep(0.4)
            assert spares.pids == []
            os.kill(pids(supervisor)["rank-0"], signal.SIGKILL)

    play([replica(0, 1)], 1, script, calm_s=1.0)


def test_a_spare_that_is_told_nothing_ends(tmp_path):
    model = tmp_path / "config.json"
    model.write_text('{"worker": {"model_dir": "/nowhere", "engine": "tests.fake_engine:made"}}')
    command = [sys.executable, "-m", "worker", "--config", str(model), "--spare"]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, check=False, timeout=20).returncode == 0


def test_a_service_that_can_start_no_spare_ends_in_order_all_the_same(tmp_path, caplog):
    """Nothing is there to be run; a system that has no room for a process refuses it in the same way."""
    claimed = RunDir(tmp_path / "run")
    lines = []
    spares = Spares((str(tmp_path / "nothing"),), 1, lambda *_: None, calm_s=0.05)
    polite = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('asked to')));"
    polite += "print('here', flush=True); time.sleep(60)"
    store = UnitSpec("store", "store", (ProcessSpec("store", (sys.executable, "-c", polite)),), QUICK)
    supervisor = Supervisor([store], claimed, lambda name, line: lines.append(line), spares)

    async def main():
        running = asyncio.create_task(supervisor.main())
        await until(lambda: "here" in lines and caplog.text.count("a spare process cannot be started") > 1)
        supervisor._stop.set()
        return await asyncio.wait_for(running, 20)

    assert asyncio.run(main()) == 0
    assert lines == ["here", "asked to"]
    claimed.close()


def test_a_try_that_takes_longer_than_the_time_between_two_leaves_the_loop_to_others(monkeypatch):
    tries = []

    def no_room(*args, **kwargs):
        tries.append(args)
        assert len(tries) < 50, "nobody else gets to run"
        time.sleep(0.02)
        raise OSError("no room")

    monkeypatch.setattr("worker.spares.Child", no_room)
    spares = Spares(("nothing",), 1, lambda *_: None, calm_s=0.01)

    async def main():
        running = asyncio.create_task(spares.run())
        await until(lambda: len(tries) > 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())


def test_spares_that_are_given_up_are_told_of(play):
    async def script(supervisor, spares, lines):
        said = supervisor._run_dir.path / GIVEN_UP_FILE
        await until(said.exists)
        given_up = decode_given_up(said.read_bytes())
        assert given_up.keys() == {SPARES}
        assert "ended before they were needed" in given_up[SPARES].why

    play([replica(0, 1)], 1, script, code="", calm_s=0.01)
