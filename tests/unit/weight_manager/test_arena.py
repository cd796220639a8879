import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from rollout_client import slot_lock
from rollout_client.arena_file import HEADER_BYTES, ArenaFile
from rollout_client.errors import ArenaError
from weight_manager import arena as arena_module
from weight_manager.arena import Arena, ArenaReader, sweep
from weight_manager.errors import StartError

SLOT = 64 << 10


@pytest.fixture
def arena(tmp_path):
    with Arena.create(tmp_path, "unit", SLOT) as made:
        yield made


def memory(path):
    return os.stat(path).st_blocks * 512


def run(code, *args):
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_what_the_store_writes_ranks_and_trainers_read(arena):
    with ArenaReader(arena.path) as reader, ArenaFile(arena.path, write=True) as writer:
        arena.slot(1)[:3] = b"abc"
        assert bytes(reader.slot(1)[:3]) == b"abc"
        writer.slot(1)[3:4] = b"d"
        assert bytes(reader.slot(1)[:5]) == b"abcd\0"
        assert not any(reader.slot(0))
        assert reader.nonce == writer.nonce == arena.nonce
        assert len(set(arena.nonce)) > 1
        with open(arena.path, "rb") as file:
            file.seek(arena.slot_offset(1))
            assert file.read(4) == b"abcd"


def test_all_of_two_slots_is_in_memory_and_the_spare_is_not(arena):
    assert memory(arena.path) == HEADER_BYTES + 2 * SLOT
    assert [arena.backed(i) for i in range(3)] == [True, True, False]
    with ArenaReader(arena.path) as reader:
        with pytest.raises(ArenaError, match="slot 2 has no memory"):
            reader.slot(2)
        arena.back(2)
        arena.slot(2)[:1] = b"x"
        assert bytes(reader.slot(2)[:1]) == b"x"
    arena.back(2)
    assert memory(arena.path) == HEADER_BYTES + 3 * SLOT
    arena.release(0)
    assert memory(arena.path) == HEADER_BYTES + 2 * SLOT
    assert not arena.backed(0)
    arena.back(0)
    assert not any(arena.slot(0))


def test_the_write_epoch_is_seen_by_all(arena):
    with ArenaReader(arena.path) as reader:
        assert reader.write_epoch(0) == reader.write_epoch(1) == 0
        assert arena.bump(1) == 1
        assert arena.bump(1) == 2
        assert (reader.write_epoch(0), reader.write_epoch(1)) == (0, 2)


def test_a_write_into_a_ranks_view_is_a_crash_and_not_a_torn_weight(arena):
    code = """
        import ctypes, sys, numpy as np
        from weight_manager.arena import ArenaReader
        reader = ArenaReader(sys.argv[1])
        view = np.frombuffer(reader.slot(0), np.uint8)
        assert not view.flags.writeable
        ctypes.memset(view.ctypes.data, 1, 1)
    """
    assert run(code, arena.path).returncode == -signal.SIGSEGV
    assert not any(arena.slot(0))


def test_a_view_outlives_the_reader_it_came_from(arena):
    arena.slot(0)[:1] = b"x"
    reader = ArenaReader(arena.path)
    view = np.frombuffer(reader.slot(0), np.uint8)
    reader.close()
    reader.close()
    arena.slot(0)[:1] = b"y"
    assert view[0] == ord("y")


@pytest.mark.parametrize(
    "content",
    [b"", b"short", b"\0" * 9000, b"PDLROLL1" + b"\0" * 9000, b"PDLROLL1" + b"\xff" * 9000],
    ids=["empty", "short", "zeros", "no slots", "absurd"],
)
def test_what_is_no_arena_is_refused(tmp_path, content):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(ArenaError, match="is not an arena"):
        ArenaFile(path)


def test_a_truncated_arena_is_refused_before_anybody_touches_what_is_gone(arena):
    os.truncate(arena.path, HEADER_BYTES + SLOT)
    with pytest.raises(ArenaError, match="is not an arena"):
        ArenaReader(arena.path)


def test_only_one_store_owns_an_arena(arena):
    with pytest.raises(ArenaError, match="in use by another store"):
        Arena.adopt(arena.path)


def test_a_restarted_store_takes_its_arena_over_with_all_mappings(tmp_path):
    code = """
        import os, signal, sys, pathlib
        from weight_manager.arena import Arena
        arena = Arena.create(pathlib.Path(sys.argv[1]), "unit", 65536)
        arena.slot(1)[:2] = b"v1"; arena.bump(1)
        print(arena.path, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    path = run(code, tmp_path).stdout.strip()
    with ArenaReader(path) as reader, Arena.adopt(path) as adopted:
        assert bytes(adopted.slot(1)[:2]) == b"v1"
        assert adopted.write_epoch(1) == 1
        adopted.slot(1)[:2] = b"v2"
        assert bytes(reader.slot(1)[:2]) == b"v2"
        assert sweep(tmp_path, "unit") == []


def test_sweep_removes_what_nobody_owns_and_nothing_else(arena, tmp_path):
    abandoned = Arena.create(tmp_path, "unit", SLOT)
    others = [Arena.create(tmp_path, name, SLOT) for name in ("unit-2", "uni")]
    for each in (abandoned, *others):
        each.close()
    bystander = tmp_path / "paddle-rollout-unit-notes.arena"
    bystander.write_bytes(b"mine")
    assert sweep(tmp_path, "unit") == [abandoned.path]
    assert {p.name for p in tmp_path.iterdir()} == {p.path.name for p in (arena, *others)} | {bystander.name}


def test_closing_may_remove_the_file(arena):
    arena.close(unlink=True)
    arena.close(unlink=True)
    assert not arena.path.exists()


def test_an_arena_that_cannot_fit_is_refused_before_anything_is_written(tmp_path):
    stat = os.statvfs(tmp_path)
    free = stat.f_bavail * stat.f_frsize // HEADER_BYTES * HEADER_BYTES
    with pytest.raises(StartError, match=r"needs \d+\.\d MiB in .*--shm-size \d+m.*shm_size.*arena_dir"):
        Arena.create(tmp_path, "unit", free)
    with pytest.raises(StartError, match="shm_size"):
        Arena.create(tmp_path, "unit", SLOT, max_fraction=SLOT / free)
    assert list(tmp_path.iterdir()) == []


SMALL_TMPFS = """
    import ctypes, os, pathlib, sys
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(0x10000000 | 0x20000) != 0:  # CLONE_NEWUSER | CLONE_NEWNS: a /dev/shm of our own
        sys.exit(77)
    pathlib.Path("/proc/self/setgroups").write_text("deny")
    pathlib.Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    pathlib.Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    where = sys.argv[1].encode()
    if libc.mount(b"tmpfs", where, b"tmpfs", 0, b"size=1m") != 0:
        sys.exit(77)
    from weight_manager.arena import Arena
    from weight_manager.errors import StartError
    from rollout_client.errors import ArenaError
    where = pathlib.Path(sys.argv[1])
    try:
        Arena.create(where, "unit", 1 << 20, max_fraction=100)
    except StartError as error:
        print("start:", error)
    print("left:", list(where.iterdir()))
    arena = Arena.create(where, "unit", 400 << 10)
    try:
        arena.back(2)
    except ArenaError as error:
        print("growth:", error)
    print("backed:", arena.backed(2), "free:", os.statvfs(where).f_bfree * 4096 >> 10)
"""


def test_a_full_tmpfs_is_an_error_at_start_and_at_growth_and_never_a_crash(tmp_path):
    done = run(SMALL_TMPFS, tmp_path)
    if done.returncode == 77:
        pytest.skip("no user namespaces here: a small tmpfs cannot be mounted")
    assert done.returncode == 0, done.stderr
    start, left, growth, backed = done.stdout.splitlines()
    assert start.startswith("start: the weight arena needs 2.0 MiB")
    assert left == "left: []"
    assert "shm_size" in growth
    assert backed == "backed: False free: 220"


def test_space_that_vanishes_after_the_check_is_an_error_too(arena, tmp_path, monkeypatch):
    """Another process fills the file system between the check and the allocation."""

    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(arena_module.os, "posix_fallocate", full)
    with pytest.raises(StartError, match="shm_size"):
        Arena.create(tmp_path, "other", SLOT)
    assert list(tmp_path.iterdir()) == [arena.path]


def test_a_place_where_no_arena_can_be_made_is_said_in_words(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=r"arena_dir .*file cannot be used: Not a directory"):
        Arena.create(tmp_path / "file", "unit", SLOT)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SLOT, hard))
    try:
        with pytest.raises(StartError, match=r"cannot be made in .*: File too large: .*ulimit -f"):
            Arena.create(tmp_path, "unit", SLOT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_writers_lock_is_seen_and_goes_with_the_writer(arena):
    span = arena.slot_offset(1), arena.slot_bytes
    writer, second = ArenaFile(arena.path, write=True), ArenaFile(arena.path, write=True)
    assert arena.writers_gone(1)
    assert slot_lock.lock_shared(writer.fd, *span)
    assert slot_lock.lock_shared(second.fd, *span)
    assert (arena.writers_gone(0), arena.writers_gone(1)) == (True, False)
    slot_lock.unlock(writer.fd, *span)
    assert not arena.writers_gone(1)
    second.close()
    assert arena.writers_gone(1)
    writer.close()


def test_a_killed_writer_holds_nothing(arena):
    code = """
        import os, signal, sys
        from rollout_client import slot_lock
        from rollout_client.arena_file import ArenaFile
        arena = ArenaFile(sys.argv[1], write=True)
        assert slot_lock.lock_shared(arena.fd, arena.slot_offset(0), arena.slot_bytes)
        print("locked", flush=True)
        signal.pause()
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(arena.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        assert not arena.writers_gone(0)
        process.kill()
        process.wait(10)
        assert arena.writers_gone(0)


def test_what_cannot_be_mapped_leaves_no_descriptor_behind(tmp_path, monkeypatch):
    def descriptors():
        return len(list(Path("/proc/self/fd").iterdir()))

    def no_memory(*_, **__):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with Arena.create(tmp_path, "t", 4096) as arena:
        before = descriptors()
        for what in ("_map", "slot"):
            with monkeypatch.context() as patched:
                patched.setattr(ArenaReader, what, no_memory)
                with pytest.raises(OSError, match="memory"):
                    ArenaReader(arena.path)
            assert descriptors() == before, what
