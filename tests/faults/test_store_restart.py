"""The store itself stops, is killed, or starts under bad circumstances."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rollout_client import errors
from rollout_client import protocol as wire
from rollout_client.publisher import WeightPublisher
from tests.faults.small_model import CONFIG
from weight_manager import messages


def test_sigterm_leaves_nothing_in_shared_memory(store, weights, trainer):
    assert len(list(store.arena_dir.iterdir())) == 1
    placement = trainer().begin(weights(9), 2)
    assert isinstance(placement, wire.Placement)
    began = time.monotonic()
    assert store.end(signal.SIGTERM) == 0
    assert time.monotonic() - began < 2
    assert list(store.arena_dir.iterdir()) == []
    store.start()
    store.wait_live()


def test_a_trainer_in_mid_push_hears_that_the_store_stops(store, weights, trainer):
    t = trainer()
    placement = t.begin(weights(9), 2, world=2)  # its seal waits for rank 1
    t.say(wire.Written(placement.session, t.write()))
    t.say(wire.Seal(placement.session))
    time.sleep(0.1)
    store.end(signal.SIGTERM)
    assert t.hear(2).message == "the store is stopping"


def test_a_killed_store_takes_its_arena_over_and_goes_on(store, replica, push, weights, digest_of, until, trainer, run):
    r = replica()
    push(weights(7), 7)
    epoch = store.status().live.epoch
    t = trainer("other")
    t.begin(weights(9), 1)
    t.write()
    store.end(signal.SIGKILL)
    (arena,) = store.arena_dir.iterdir()
    store.start()
    store.wait_live()
    assert list(store.arena_dir.iterdir()) == [arena]
    live = store.status().live
    assert (live.run_id, live.version, live.epoch) == (run, 7, epoch)
    assert store.serving() == r.served() == (7, digest_of(weights(7)))
    until(lambda: store.status().replicas.get("0", {}).get("ready"))
    assert t.ask(wire.Seal(t.placement.session)).code == "unknown_session"
    with pytest.raises(errors.StaleVersion):
        push(weights(6), 6)
    assert push(weights(8), 8).replicas == 1
    assert store.serving() == r.served() == (8, digest_of(weights(8)))
    assert store.status().live.epoch > epoch


def test_a_store_killed_in_mid_commit_serves_the_old_version(store, replica, push, weights, digest_of, until, trainer):
    good, other = replica(0), replica(1)
    push(weights(1), 1)
    other.plan["flip"] = "silent"
    t = trainer()
    placement = t.begin(weights(2), 2)
    t.say(wire.Written(placement.session, t.write()))
    t.ask(wire.Seal(placement.session))
    t.say(wire.Commit(placement.session))
    until(lambda: good.live.version == 2 and other.saw(messages.Flip))
    flipped_epoch = good.live.epoch
    store.end(signal.SIGKILL)
    other.plan.clear()
    store.start()
    store.wait_live()
    assert store.serving() == (1, digest_of(weights(1)))
    until(lambda: all(store.status().replicas.get(n, {}).get("ready") for n in ("0", "1")))
    assert good.served() == other.served() == (1, digest_of(weights(1)))
    assert push(weights(3), 3).replicas == 2
    assert store.serving() == good.served() == other.served() == (3, digest_of(weights(3)))
    assert good.live.epoch > flipped_epoch, "an epoch that a replica has seen never comes again"


def test_an_arena_that_was_tampered_with_is_not_taken_over(store, push, weights, digest_of):
    push(weights(7), 7)
    live = store.status().live
    store.end(signal.SIGKILL)
    (arena,) = store.arena_dir.iterdir()
    offset = 4096 + live.slot * (arena.stat().st_size - 4096) // 3 + 64
    with arena.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    store.start()
    store.wait_live()
    assert store.serving() == (0, digest_of(weights(0))), "back to the checkpoint, under its own name"
    push(weights(7), 7)
    with pytest.raises(errors.StaleVersion):
        push(weights(6), 6)


@pytest.mark.parametrize("store_config", [{"snapshot": True}])
def test_a_snapshot_brings_the_last_version_back_into_an_empty_container(
    store, push, weights, digest_of, until, store_config, run
):
    push(weights(7), 7)
    until(lambda: store.status().counters["snapshots"] >= 2)
    store.end(signal.SIGKILL)
    for arena in store.arena_dir.iterdir():
        arena.unlink()
    store.start()
    store.wait_live()
    live = store.status().live
    assert (live.run_id, *store.serving()) == (run, 7, digest_of(weights(7)))
    assert store.status().history[-1]["source"] == "snapshot"
    with pytest.raises(errors.StaleVersion):
        push(weights(6), 6)
    push(weights(8), 8)
    assert store.serving() == (8, digest_of(weights(8)))


@pytest.mark.parametrize("store_config", [{"snapshot": True}])
def test_a_snapshot_of_a_stopped_store_is_whole(store, push, weights, digest_of, store_config):
    push(weights(7), 7)
    store.end(signal.SIGTERM)
    store.start()
    store.wait_live()
    assert store.serving() == (7, digest_of(weights(7)))


def test_half_files_that_crashes_left_are_removed(store, push, weights):
    """A snapshot is as large as the model, and each store that dies while it writes one leaves another."""
    push(weights(7), 7)
    store.end(signal.SIGKILL)
    left = [store.run_dir / f".{name}.{pid}" for name in ("snapshot.weights", "weights.json") for pid in (4711, 4712)]
    for path in left:
        path.write_bytes(b"half of it")
    others = store.run_dir / ".others.4711"
    others.touch()
    store.start()
    store.wait_live()
    assert not [path for path in left if path.exists()]
    assert others.exists()


@pytest.mark.parametrize("store_config", [{"snapshot": True}])
def test_a_damaged_snapshot_is_not_served(store, push, weights, digest_of, until, store_config):
    push(weights(7), 7)
    store.end(signal.SIGTERM)
    path = store.run_dir / "snapshot.weights"
    raw = bytearray(path.read_bytes())
    raw[4096 + 100] ^= 1
    path.write_bytes(raw)
    store.start()
    store.wait_live()
    assert store.serving() == (0, digest_of(weights(0)))


def test_history_survives_and_is_capped(launch, weights, until):
    store = launch(history=3).wait_live()
    with WeightPublisher(store.endpoint, run_id="run", progress=False) as publisher:
        for version in range(1, 6):
            publisher.push(weights(version), version, timeout_s=10)
    store.end(signal.SIGKILL)
    store.start()
    store.wait_live()
    assert [r["version"] for r in store.status().history] == [3, 4, 5]


def failed_start(launch, **config):
    store = launch(**config)
    assert store.process.wait(15) == 1
    last = json.loads((store.run_dir / "log").read_text().splitlines()[-1])
    assert list(store.arena_dir.iterdir()) == []
    return last["message"]


def test_a_second_store_of_the_same_service_is_refused(store):
    command = [sys.executable, "-m", "weight_manager", "--config", str(store.config_file)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    assert second.returncode == 1
    assert "another store runs in" in second.stderr
    assert store.status().live.version == 0


def test_a_port_in_use_says_so(launch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on tcp://127.0.0.1:{port}" in failed_start(
            launch, push_endpoint=f"tcp://127.0.0.1:{port}"
        )


def test_an_open_endpoint_without_a_token_says_what_to_do(launch):
    assert "set a token" in failed_start(launch, push_endpoint="tcp://0.0.0.0:0")


def test_a_checkpoint_without_weights_says_so(launch, model, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((model / "config.json").read_bytes())
    assert "holds no model.safetensors" in failed_start(launch, model=bare)


def test_a_tp_that_does_not_fit_says_so(launch):
    assert "cannot be served with tp 3" in failed_start(launch, tp=3)


def test_a_wrong_token_is_refused_and_counted(launch, weights):
    store = launch(token="a shared secret, long").wait_live()
    for token in ("", "another secret, long"):
        with (
            WeightPublisher(store.endpoint, run_id="run", token=token, progress=False) as publisher,
            pytest.raises(errors.Unauthorized),
        ):
            publisher.push(weights(1), 1, timeout_s=30)
    assert store.status().counters["unauthorized"] == 2
    with WeightPublisher(store.endpoint, run_id="run", token="a shared secret, long", progress=False) as publisher:
        assert publisher.push(weights(1), 1, timeout_s=30).version == 1
    assert "a shared secret" not in (store.run_dir / "log").read_text()


def test_an_idle_store_sleeps(store, replica):
    replica()

    def busy_s() -> float:
        fields = Path(f"/proc/{store.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    windows = []
    for _ in range(3):  # the first may still hold the start's last work, or a neighbour's noise
        before = busy_s()
        time.sleep(3)
        windows.append(busy_s() - before)
        if windows[-1] < 0.085:  # 3 % of a core, with a replica that beats ten times a second
            return
    raise AssertionError(f"processor seconds in 3 s: {windows}")


def test_sigterm_while_the_arena_is_being_made_leaves_nothing(launch, tmp_path, until):
    big = tmp_path / "big"
    big.mkdir()
    (big / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 1 << 20}))  # two slots of 256 MiB
    with TemporaryDirectory(dir="/dev/shm") as arenas:
        store = launch(model=big, load_weights=False, arena_dir=Path(arenas))
        until(lambda: list(store.arena_dir.iterdir()))
        assert store.end(signal.SIGTERM) == 0
        assert list(store.arena_dir.iterdir()) == []


def test_a_store_does_not_outlive_its_parent(store, tmp_path, until):
    store.end()
    start = "import subprocess, sys, time; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); time.sleep(60)"
    command = [sys.executable, "-c", start, sys.executable, "-m", "weight_manager", "--config", str(store.config_file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        pid = int(parent.stdout.readline())
        store.wait_live()
        assert len(list(store.arena_dir.iterdir())) == 1
        parent.kill()
    until(lambda: not list(store.arena_dir.iterdir()))
    until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes())
