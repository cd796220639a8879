import logging
import struct

import pytest

from weight_manager.config import StoreConfig
from weight_manager.devices import Devices
from weight_manager.first_weights import open_arena
from weight_manager.history import History, Record
from weight_manager.layout import Manifest, Parameter, make_layout, region_digests, version_digest
from weight_manager.messages import Live
from weight_manager.metrics import Counters
from weight_manager.watching import Watching

LAYOUT = make_layout(Manifest("LlamaForCausalLM", "float32", (Parameter("a", (64, 64)), Parameter("b", (8,)))), 1)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "arenas").mkdir()
    return StoreConfig(model=tmp_path, run_dir=tmp_path, arena_dir=tmp_path / "arenas", name="unit")


@pytest.fixture
def left(config, tmp_path):
    """What a store that has died left: an arena whose slot 1 holds version 7. The arena's path."""
    history = History(tmp_path / "h.json", 10)
    arena, taken_over = open_arena(config, LAYOUT, history, Devices(tmp_path, Watching()), Counters())
    assert not taken_over
    with arena:
        arena.slot(1)[:4] = b"\0\0\0\x40"
        digest = version_digest(LAYOUT, region_digests(LAYOUT, arena.slot(1)))
        live = Live("run", 7, history.next_epoch(), 1, digest)
        history.commit(live, Record("run", 7, live.epoch, digest, 1.5, "push"))
        return arena.path


def opened(config, tmp_path):
    history, devices = History(tmp_path / "h.json", 10), Devices(tmp_path, Watching())
    arena, taken_over = open_arena(config, LAYOUT, history, devices, Counters())
    arena.close()
    return arena.path, taken_over


def test_hints_that_older_trainers_and_replicas_left_in_the_header_change_nothing(config, left, tmp_path):
    with left.open("r+b") as file:
        file.seek(48)
        file.write(struct.pack("<Q", 2**63))
        file.seek(1024)
        file.write(b"\xff" * 3072)
    assert opened(config, tmp_path) == (left, True)


def test_an_arena_of_another_layout_is_made_anew_and_the_log_says_so(config, left, tmp_path, caplog):
    with left.open("r+b") as file:
        file.write(b"PDLROLL1")
    with caplog.at_level(logging.WARNING):
        path, taken_over = opened(config, tmp_path)
    assert (path != left, taken_over, left.exists()) == (True, False, False)
    assert f"cannot be taken over: {left} is not an arena of this version" in caplog.text
