"""What a node needs besides the weights: the configuration, the tokenizer, the key of the replica's socket."""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from weight_manager.arena import sweep as sweep_arenas

LARGEST = 64 << 20
SUFFIXES = {".json", ".txt", ".jinja", ".model"}
KEYS = "replica-keys"
"""Directory in the head's run directory: store.key for the replicas, api.key for the API."""
KEY_FILE = "replica.key"
API_KEY_FILE = "api.key"
SHIPPED = (KEY_FILE, API_KEY_FILE, "api.json", "model", "model/*")
"""In the run directory of a node, besides what every service has there."""
LOCKS = ("lock", "store.lock")
"""Held by whoever uses a run directory."""


@dataclass(frozen=True)
class Shipment:
    """store, worker, api: the parts of the head's configuration. model: small files of the checkpoint, by name.

    key: of the replicas; api_key: of whoever asks them.
    """

    name: str
    store: dict[str, Any]
    worker: dict[str, Any]
    model: dict[str, bytes]
    key: bytes
    api: dict[str, Any]
    api_key: bytes
    release: str

    def store_name(self, label: str) -> str:
        """Name of a node's store; part of its arena's name."""
        return f"{self.name[:48]}-{label}"

    def unpack(self, run_dir: Path, label: str, *, upstream: str, host: str, relay_port: int) -> Path:
        """Write run_dir/config.json and what it names; returns its path. relay_port: where further stores join."""
        model = run_dir / "model"
        model.mkdir(parents=True, exist_ok=True)
        for name, content in self.model.items():
            (model / name).write_bytes(content)
        key = run_dir / KEY_FILE
        key.touch(mode=0o600)
        key.write_bytes(self.key)
        store = self.store | {
            "name": self.store_name(label),
            "run_dir": str(run_dir),
            "state_dir": None,
            "model": str(model),
            "load_weights": False,
            "push_endpoint": "tcp://127.0.0.1:*",
            "data_port": None,  # nobody pushes there
            "relay_data_port": 0,  # several nodes may share a host
            "curve_keys": None,
            "upstream": upstream,
            "relay_endpoint": f"tcp://{bracketed(host)}:{relay_port}" if relay_port else None,
            "disk_roots": [],
            "snapshot": False,
        }
        worker = self.worker | {"model_dir": str(model), "curve_keys": str(key)}
        path = run_dir / "config.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps({"store": store, "worker": worker}))
        return path

    def unpack_api(self, run_dir: Path, label: str, *, head_url: str, host: str, port: int) -> Path:
        """Write run_dir/api.json, for an API beside the node's store; returns its path."""
        key = run_dir / API_KEY_FILE
        key.touch(mode=0o600)
        key.write_bytes(self.api_key)
        api = self.api | {
            "head_url": head_url,
            "place": label,
            "host": host,
            "port": port,
            "workers": 1,
            "run_dir": str(run_dir),
            "state_dir": None,
            "replicas_file": str(run_dir / "replicas.json"),
            "replica_keys": str(key),
            "model": str(run_dir / "model"),
            "served_model_name": self.api["served_model_name"] or Path(self.api["model"]).name,
        }
        path = run_dir / "api.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps({"api": api}))
        return path


def pack(config_path: Path, name: str, keys: Path) -> Shipment:
    """Read what nodes need from the head's config.json and its directory of keys. Raises OSError, ValueError."""
    document = json.loads(config_path.read_bytes())
    model = Path(document["worker"]["model_dir"])
    files = {p.name: p for p in model.iterdir() if p.suffix in SUFFIXES and p.is_file() and p.stat().st_size <= LARGEST}
    content = {name: path.read_bytes() for name, path in files.items()}
    key, api_key = ((keys / f"{whose}.key").read_bytes() for whose in ("store", "api"))
    return Shipment(name, document["store"], document["worker"], content, key, document["api"], api_key, release())


def release() -> str:
    """Version of this package; all nodes need the same."""
    return version("paddle-rollout")


def run_dir_on(node: str, name: str) -> Path:
    """Short, since socket paths end at 107 bytes; its own for each node, since a host may carry two in tests."""
    return Path(tempfile.gettempdir()) / f"paddle-rollout-ray-{name[:40]}-{node[:8]}"


def sweep(shipment: Shipment) -> None:
    """Remove what earlier nodes of this service left on this host: killed ones remove neither files nor their arena.

    Not what a link leads to: anybody may write where these directories are.
    """
    pattern = run_dir_on("?" * 8, shipment.name)
    for run_dir in pattern.parent.glob(pattern.name):
        with contextlib.suppress(FileNotFoundError):  # another node of this host sweeps, too
            if run_dir.lstat().st_uid != os.getuid() or run_dir.is_symlink():
                continue
            if not any(_held(run_dir / lock) for lock in LOCKS):
                erase(shipment, run_dir, keep=())


def erase(shipment: Shipment, run_dir: Path, keep: tuple[str, ...] = LOCKS[:1]) -> None:
    """Remove the files, but crash reports, and the arena of a node's store that has ended, in whatever way.

    keep: what whoever holds the directory removes itself.
    """
    sweep_arenas(Path(shipment.store["arena_dir"]), shipment.store_name(run_dir.name.rpartition("-")[2]))
    if run_dir.exists():
        _remove(run_dir, keep)


def _held(lock: Path) -> bool:
    """Somebody who lives has locked it."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _remove(run_dir: Path, keep: tuple[str, ...]) -> None:
    for path in run_dir.iterdir():
        if path.is_dir() and path.name != "crashes":
            shutil.rmtree(path, ignore_errors=True)
        elif (path.is_file() or path.is_socket()) and path.name not in keep:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something is left, or is another's by now
        run_dir.rmdir()


def bracketed(host: str) -> str:
    """A host as part of an endpoint: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host
