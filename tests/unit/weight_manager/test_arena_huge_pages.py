"""A real arena on /dev/shm, whose slots move into huge pages while others use, release and back them."""

import os
import tempfile
import threading
from pathlib import Path

import numpy as np

from rollout_client.aligned_map import HUGE
from rollout_client.arena_file import HEADER_BYTES, ArenaFile
from weight_manager import arena as arena_module
from weight_manager.arena import Arena, ArenaReader


def test_slots_move_into_huge_pages_under_those_who_use_them():
    """As many as the kernel says it has mapped; their bytes stay, and other mappings see them."""
    size = 3 * HUGE + HEADER_BYTES
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        Arena.create(Path(directory), "unit", size) as arena,
        ArenaFile(arena.path, write=True) as trainer,
    ):
        pattern = np.arange(size // 8, dtype=np.uint64)
        np.frombuffer(trainer.slot(1), np.uint64)[:] = pattern
        moved = arena.use_huge_pages(1, lambda: True)
        assert moved in (0, 3 * HUGE)
        with ArenaReader(arena.path) as reader:
            for view in (arena.slot(1), trainer.slot(1), reader.slot(1)):
                assert np.array_equal(np.frombuffer(view, np.uint64), pattern)
            starts = {np.frombuffer(file.slot(1), np.uint8).ctypes.data for file in (arena, trainer, reader)}
        assert all(start % HUGE == 0 for start in starts)
        assert huge_bytes(arena.path) >= moved
        assert arena.use_huge_pages(0, lambda: False) == 0


def test_a_slot_that_is_released_is_not_moved_into_huge_pages_any_more():
    """Its memory went back: a piece of a view from before would give it some again."""
    size = 3 * HUGE + HEADER_BYTES
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        Arena.create(Path(directory), "unit", size) as arena,
    ):
        assert arena.use_huge_pages(1, lambda: arena.release(1) is None) == 0
        used = os.stat(arena.path).st_blocks
        assert arena.use_huge_pages(1, lambda: True) == 0
        assert os.stat(arena.path).st_blocks == used < 2 * size // 512


def test_a_release_waits_for_the_piece_that_moves(monkeypatch):
    size = 3 * HUGE + HEADER_BYTES
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        Arena.create(Path(directory), "unit", size) as arena,
    ):
        releasing = threading.Thread(target=arena.release, args=(1,))

        def collapse(view):
            releasing.start()
            releasing.join(0.05)
            assert arena.backed(1)
            return len(view) > 0

        monkeypatch.setattr(arena_module, "collapse", collapse)
        assert arena.use_huge_pages(1, lambda: True) == 3 * HUGE
        releasing.join(30)
        assert not arena.backed(1)


def huge_bytes(path):
    """Bytes of this process's mappings of a file that are mapped by huge pages."""
    total, ours = 0, False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if "-" in line.split()[0]:
                ours = str(path) in line
            elif ours and line.startswith("ShmemPmdMapped:"):
                total += int(line.split()[1]) << 10
    return total
