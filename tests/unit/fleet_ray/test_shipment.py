import fcntl
import os
import stat
from pathlib import Path

import pytest

from api.config import ApiConfig
from fleet_ray import shipment as module
from fleet_ray.shipment import erase, run_dir_on, sweep
from rollout_client.curve import TrainerKeys
from weight_manager.config import StoreConfig
from weight_manager.curve import StoreKeys
from worker.config import read_worker_config

NONCE = "00ff" * 8


def test_a_node_gets_all_it_needs_and_no_weights(packed, tmp_path):
    run_dir = tmp_path / "node"
    path = packed.unpack(run_dir, "abcd1234", upstream="tcp://10.0.0.1:5601", host="fd00::2", relay_port=7000)
    assert sorted(p.name for p in (run_dir / "model").iterdir()) == ["config.json", "tokenizer.json"]
    store, worker = StoreConfig.read(path), read_worker_config(path)
    assert (store.upstream, store.relay_endpoint) == ("tcp://10.0.0.1:5601", "tcp://[fd00::2]:7000")
    assert (store.load_weights, store.disk_roots, store.snapshot) == (False, (), False)
    assert store.name == "svc-abcd1234"
    assert store.token == "a token of the fleet"
    assert worker.model_dir == run_dir / "model"
    assert StoreKeys.read(worker.curve_keys).trainers.keys() == {"api"}
    for secret in (path, worker.curve_keys):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_the_api_of_a_node_is_the_heads_program_with_other_places(packed, tmp_path):
    run_dir = tmp_path / "node"
    packed.unpack(run_dir, "abcd1234", upstream="tcp://10.0.0.1:5601", host="127.0.0.2", relay_port=7000)
    path = packed.unpack_api(run_dir, "abcd1234", head_url="http://10.0.0.1:8000", host="127.0.0.2", port=0)
    api = ApiConfig.read(path)
    assert (api.head_url, api.place, api.host, api.port) == ("http://10.0.0.1:8000", "abcd1234", "127.0.0.2", 0)
    assert (api.run_dir, api.store_endpoint) == (run_dir, f"ipc://{run_dir}/store.sock")
    assert (api.model_name, api.model) == ("model", run_dir / "model")
    assert api.replicas_file == run_dir / "replicas.json"
    assert TrainerKeys.read(api.replica_keys)
    for secret in (path, api.replica_keys):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert packed.api["place"] == "head"


def test_what_a_killed_node_left_is_swept_and_what_lives_is_not(packed, tmp_path, monkeypatch):
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    arenas = tmp_path / "arenas"
    arenas.mkdir()
    packed.store["arena_dir"] = str(arenas)
    locks = {}
    for label in ("dead0000", "live0000"):
        run_dir = run_dir_on(label, "svc")
        packed.unpack(run_dir, label, upstream="tcp://10.0.0.1:5601", host="10.0.0.2", relay_port=7000)
        (arenas / f"paddle-rollout-svc-{label}-{NONCE}.arena").touch()
        (arenas / f"paddle-rollout-team-svc-{label}-{NONCE}.arena").touch()  # of a service whose name ends like ours
        locks[label] = (run_dir / "store.lock").open("wb")
    fcntl.flock(locks["live0000"], fcntl.LOCK_EX)
    sweep(packed)
    assert sorted(path.name for path in arenas.iterdir()) == [
        f"paddle-rollout-svc-live0000-{NONCE}.arena",
        f"paddle-rollout-team-svc-dead0000-{NONCE}.arena",
        f"paddle-rollout-team-svc-live0000-{NONCE}.arena",
    ]
    assert not run_dir_on("dead0000", "svc").exists()
    assert (run_dir_on("live0000", "svc") / "config.json").exists()
    for lock in locks.values():
        lock.close()


def test_a_sweep_leaves_services_of_longer_names_and_what_links_lead_to(packed, tmp_path, monkeypatch):
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    packed.store["arena_dir"] = str(tmp_path)
    other = run_dir_on("dead0000", "svc-b")
    home = tmp_path / "home"
    for directory in (other, home):
        directory.mkdir()
        (directory / "config.json").touch()
    run_dir_on("1234abcd", "svc").symlink_to(home)
    sweep(packed)
    assert (other / "config.json").exists()
    assert (home / "config.json").exists()


@pytest.mark.parametrize("gone_when", ["listed", "looked at", "emptied"])
def test_nodes_of_one_host_may_sweep_at_the_same_time(packed, tmp_path, monkeypatch, gone_when):
    """Whoever comes second finds nothing any more, and its store starts all the same."""
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    packed.store["arena_dir"] = str(tmp_path)
    dead = run_dir_on("dead0000", "svc")
    dead.mkdir()
    held, remove = module._held, module._remove
    glob = Path.glob

    def listed(path, pattern):
        found = list(glob(path, pattern))
        if gone_when == "listed":
            dead.rmdir()
        return found

    def looked_at(lock):
        if gone_when == "looked at" and dead.exists():
            dead.rmdir()
        return held(lock)

    def emptied(run_dir, keep):
        if gone_when == "emptied":
            dead.rmdir()
        remove(run_dir, keep)

    monkeypatch.setattr(Path, "glob", listed)
    monkeypatch.setattr(module, "_held", looked_at)
    monkeypatch.setattr(module, "_remove", emptied)
    sweep(packed)
    assert not dead.exists()


def test_crash_reports_stay(packed, tmp_path):
    packed.store["arena_dir"] = str(tmp_path)
    tmp_path = tmp_path / "node"
    (tmp_path / "crashes").mkdir(parents=True)
    (tmp_path / "crashes" / "report.txt").touch()
    (tmp_path / "config.json").touch()
    (tmp_path / "model").mkdir()
    erase(packed, tmp_path)
    assert os.listdir(tmp_path) == ["crashes"]
