"""``paddle-rollout push``: a checkpoint directory becomes the next version, as a trainer would push it."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from api.cli.connect import address_of, explained, read_token
from rollout_client.protocol import InFlight
from rollout_client.publisher import WeightPublisher
from rollout_client.push_report import PushReport
from weight_manager.checkpoint import Checkpoint, Tensor, read_config
from weight_manager.errors import CheckpointError
from weight_manager.families import manifest_for
from weight_manager.redundant import wanted

console = Console(highlight=False)


def run(
    directory: Path,
    version: int | None,
    endpoint: str | None,
    run_id: str | None,
    in_flight: InFlight,
    force: bool,
    token_file: Path | None,
    keys: Path | None,
    name: str,
) -> int:
    """Push; returns the exit status."""
    with explained():
        try:
            with Checkpoint(directory) as checkpoint:
                where = endpoint or address_of(name, "push_endpoint", "tcp://127.0.0.1:5600")
                _must_listen(where)
                tensors = {t.part.name: _array(t) for t in wanted(checkpoint, _owners(directory))}
                report = _push(tensors, version, where, run_id, in_flight, force, token_file, keys)
        except CheckpointError as error:
            raise ValueError(error.message) from None
    took = f"{report.seconds['total']:.2f} s over {report.transport}"
    stall = max(report.stall_ms.values(), default=0.0)
    replicas = "1 replica" if report.replicas == 1 else f"{report.replicas} replicas"
    already = "was live already" if report.already else f"live on {replicas}"
    text = f"version {report.version} {already}, {took}, longest stall {stall:.1f} ms, digest {report.digest}"
    console.print(text, soft_wrap=True)
    return 0


def _push(
    tensors: dict[str, npt.NDArray[Any]],
    version: int | None,
    endpoint: str,
    run_id: str | None,
    in_flight: InFlight,
    force: bool,
    token_file: Path | None,
    keys: Path | None,
) -> PushReport:
    """Versions go on from the live one, in its run, unless told otherwise."""
    token = read_token(token_file) or os.environ.get("PADDLE_ROLLOUT_PUSH_TOKEN", "")
    fresh_run = f"cli-{time.time():.0f}"
    with WeightPublisher(endpoint, run_id=fresh_run, token=token, keys=keys) as publisher:
        live = publisher.connect()
    target = 1 if live.live_version is None else live.live_version + 1
    with WeightPublisher(endpoint, run_id=run_id or live.live_run or fresh_run, token=token, keys=keys) as publisher:
        return publisher.push(tensors, target if version is None else version, in_flight=in_flight, force=force)


def _must_listen(endpoint: str) -> None:
    """A person at a terminal should not wait for a store that is not there. Raises OSError."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if endpoint.startswith("tcp://") and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
        except OSError as error:
            raise OSError(
                f"no store listens on {endpoint}: {error.strerror or error}\n"
                "Is the service running? Start it with `paddle-rollout serve MODEL`, or say --endpoint or --name."
            ) from None


def _owners(directory: Path) -> dict[str, str]:
    """Any name of a tensor -> its first one, by the directory's config.json; without one no names are tied."""
    if not (directory / "config.json").is_file():
        return {}
    try:
        manifest = manifest_for(read_config(directory), "float32")
    except ValueError:  # of no family here: the service says what it misses
        return {}
    return {name: p.name for p in manifest.parameters for name in (p.name, *p.aliases)}


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    """The tensor, mapped; bfloat16, which numpy lacks, as the equal float32 values."""
    part, path = tensor.part, tensor.file.path
    if tensor.nbytes == 0:
        return np.empty(part.shape, np.float32)
    if part.dtype == "bfloat16":
        bits = np.memmap(path, "<u2", "r", tensor.offset, part.shape)
        return (bits.astype("<u4") << 16).view("<f4")
    return np.memmap(path, np.dtype(part.dtype).newbyteorder("<"), "r", tensor.offset, part.shape)
