"""The actor's own part, without Ray: a real store process that is started, moved, killed and stopped, in any order.

Only where it runs is made up: Ray would tell it.
"""

import asyncio
import os
import signal
import socket
import tempfile
import time
from pathlib import Path

import pytest

from fleet_ray import actors, shipment
from fleet_ray.actors import NodeStore, Place

NOWHERE = "tcp://127.0.0.1:9"
ELSEWHERE = "tcp://127.0.0.1:7"
"""Stores above that are not there: a store below waits for them."""


@pytest.fixture
def scratch(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="fr-") as short:  # socket paths end at 107 bytes
        monkeypatch.setattr(shipment.tempfile, "gettempdir", lambda: short)
        yield Path(short)


@pytest.fixture
def arenas(packed, tmp_path):
    place = tmp_path / "arenas"
    place.mkdir()
    packed.store["arena_dir"] = str(place)
    return place


@pytest.fixture
def node(packed, scratch, arenas, monkeypatch):
    monkeypatch.setattr(actors, "_here", lambda: Place("abcd12345678", "127.0.0.1"))
    return NodeStore(packed, "warning")


async def test_a_port_that_somebody_has_taken_since_is_not_the_store_s(node):
    """It was chosen when the actor was made, which may be long before its store is started."""
    _, first = await node.start(NOWHERE)
    node._unit.stop()
    await node._life
    with socket.create_server(("127.0.0.1", int(first.rpartition(":")[2]))):
        _, second = await node.start(NOWHERE)
        assert second != first
    await node.stop()


def pid_of(node):
    return node._unit.processes()[0].pid


async def test_a_store_ends_with_its_files_and_its_arena(node, scratch, arenas):
    await node.start(NOWHERE)
    assert len(list(scratch.iterdir())) == 1
    assert len(list(arenas.iterdir())) == 1
    await node.stop()
    assert list(arenas.iterdir()) == []
    assert list(scratch.iterdir()) == []


async def test_a_store_killed_in_the_moment_it_is_stopped_leaves_no_arena(node, scratch, arenas):
    await node.start(NOWHERE)
    os.kill(pid_of(node), signal.SIGKILL)
    await node.stop()
    assert list(arenas.iterdir()) == []


async def test_a_move_ends_with_the_store_and_does_not_keep_the_head_waiting(node, arenas):
    await node.start(NOWHERE)
    began = time.monotonic()
    move = asyncio.create_task(node.start(ELSEWHERE))
    await asyncio.sleep(0)
    await node.stop()
    with pytest.raises(RuntimeError, match="did not start: stopped"):
        await move
    assert time.monotonic() - began < actors.STOP_S + 2
    assert list(arenas.iterdir()) == []


async def test_a_move_that_comes_late_starts_nothing(node, arenas):
    await node.start(NOWHERE)
    await node.stop()
    with pytest.raises(RuntimeError, match="told to stop"):
        await node.start(ELSEWHERE)
    assert list(arenas.iterdir()) == []


async def test_a_store_that_is_slow_to_listen_is_waited_for_again_and_not_taken_to_listen(node, monkeypatch):
    """On a loaded host: who is told that it listens starts a replica, which gives up after a while."""
    monkeypatch.setattr(actors, "BOUND_S", 0.01)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has not listened within"):
            await node.start(NOWHERE)
    pid = pid_of(node)
    monkeypatch.setattr(actors, "BOUND_S", 30.0)
    run_dir, _ = await node.start(NOWHERE)
    assert (Path(run_dir) / "push_endpoint").exists()
    assert pid_of(node) == pid, "it was left to start"
    await node.stop()


async def test_what_a_node_has_is_kept_from_cleaners_of_temporary_directories(node):
    """They remove what is some days old; a rank that is started again then needs the configuration and the key."""
    run_dir = Path((await node.start(NOWHERE))[0])
    files = [path for path in run_dir.rglob("*") if "crashes" not in path.parts]  # noqa: ASYNC240
    assert {"config.json", "replica.key", "store.lock", "model"} <= {path.name for path in files}
    for path in files:
        os.utime(path, (0.0, 0.0), follow_symlinks=False)
    node._young.cancel()
    node._young = None  # an hour has gone by
    await node.start(NOWHERE)
    await asyncio.sleep(0.1)
    assert [path.name for path in files if path.stat().st_mtime == 0.0] == []
    await node.stop()
    assert node._young.done()
