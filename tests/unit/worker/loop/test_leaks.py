"""Nothing grows: mappings of the arena, open files and memory after many clears, reloads and commits."""

import gc
import os
from pathlib import Path

from worker.messages import Clear, Reload


def held(rig):
    """Mappings of the arena and open files of this process (loop, store and API all live in it)."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count(str(rig.arena.path))
    return maps, len(os.listdir("/proc/self/fd"))


def test_fifty_clears_and_reloads(rig):
    rig.serve()
    for turn in range(50):
        rig.api.call(Clear)
        rig.api.call(Reload)
        if turn == 2:
            before = held(rig)
    assert held(rig) == before
    rig.api.generate("a")
    rig.api.finish("a")
    rig.check(rig.api, "a")


def test_a_hundred_commits(rig):
    live = rig.serve()
    for version in range(1, 101):
        live = rig.store.write(version, 1 - live.slot)
        rig.store.push(f"s{version}", live)
        if version == 2:
            before = held(rig)
    assert held(rig) == before
    rig.api.generate("a")
    rig.api.finish("a")
    rig.check(rig.api, "a")
    assert rig.api.stats().version == 100


def test_a_cleared_rank_holds_no_mapping(rig):
    rig.serve()
    owner = Path("/proc/self/maps").read_text().count(str(rig.arena.path))
    rig.api.call(Clear)
    gc.collect()
    rest = Path("/proc/self/maps").read_text().count(str(rig.arena.path))
    assert 0 < rest < owner  # what is left is the scripted store's
    rig.api.call(Reload)
