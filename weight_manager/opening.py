"""What a store needs before it can be one. Each raises StartError saying what to change."""

import fcntl
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from rollout_client.curve import TrainerKeys
from weight_manager.checkpoint import read_config
from weight_manager.config import StoreConfig
from weight_manager.curve import StoreKeys
from weight_manager.errors import CheckpointError, StartError
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout
from weight_manager.manifest import Layout


def layout_of(config: StoreConfig) -> Layout:
    """Where everything lies that the model serves."""
    try:
        return make_layout(manifest_for(read_config(config.model), config.dtype), config.tp)
    except (ValueError, CheckpointError) as error:
        raise StartError(f"{config.model} cannot be served with tp {config.tp}: {error}") from error


def keys_of(config: StoreConfig) -> StoreKeys | None:
    """Its key file, if it has one."""
    try:
        return None if config.curve_keys is None else StoreKeys.read(config.curve_keys)
    except (OSError, ValueError) as error:
        raise StartError(f"curve_keys: {error}") from error


def relay_keys_of(config: StoreConfig) -> TrainerKeys | None:
    """Its own keys for the store above, if it has some."""
    try:
        return None if config.relay_keys is None else TrainerKeys.read(config.relay_keys)
    except (OSError, ValueError) as error:
        raise StartError(f"relay_keys: {error}") from error


def bound_before(endpoint: str, file: Path) -> str | None:
    """Of an endpoint that asks for a free port: the same with the port of the process before this one, if there was
    one.
    """
    host, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or port not in ("*", "0"):
        return None
    try:
        return f"{host}:{urlsplit(file.read_text().strip()).port or port}"
    except (OSError, ValueError):
        return None


def lock_run_dir(run_dir: Path) -> BinaryIO:
    """Held as long as the file is open: one store to a run directory."""
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (run_dir / "store.lock").open("wb")
    except OSError as error:
        raise StartError(f"run_dir {run_dir} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise StartError(f"another store runs in {run_dir}; stop it, or choose another name or run_dir") from None
    return lock
