import errno
import os
from pathlib import Path

import msgspec
import pytest

from weight_manager import history as module
from weight_manager import whole_file
from weight_manager.adapters.line import LineHistory
from weight_manager.adapters.plan import AdapterModule, AdapterShape
from weight_manager.arena import in_memory
from weight_manager.errors import StartError
from weight_manager.history import RESERVE, History, Record
from weight_manager.messages import Live


def live(version, epoch, run_id="run"):
    return Live(run_id, version, epoch, epoch % 2, f"{version:016x}")


def record(one):
    return Record(one.run_id, one.version, one.epoch, one.digest, 1.5, "push")


def commit(history, version, run_id="run"):
    one = live(version, history.next_epoch(), run_id)
    history.commit(one, record(one))
    return one


def test_a_restart_goes_on_where_the_last_life_ended(tmp_path):
    path = tmp_path / "h.json"
    first = History(path, 10)
    first.moved(tmp_path / "a.arena", "layout")
    commit(first, 1)
    newest = commit(first, 2)
    second = History(path, 10)
    assert second.live == newest
    assert second.previous.version == 1
    assert second.saved.arena == str(tmp_path / "a.arena")
    assert [r["version"] for r in second.tail(5)] == [1, 2]
    assert second.last("run").version == 2
    assert second.last("another") is None


def test_what_was_written_while_others_decided_only_takes_its_name_at_the_commit(tmp_path, monkeypatch):
    """Syncing takes milliseconds, in which everybody waits for the commit."""
    path = tmp_path / "h.json"
    history = History(path, 10)
    before = commit(history, 1)
    one = live(2, history.next_epoch())
    history.draft(one, record(one))
    assert History(path, 10).live == before, "nothing is said of it before"
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda *_: pytest.fail("synced while everybody waits"))
        history.commit(one, msgspec.structs.replace(record(one), time=2.5, seconds={"commit": 0.01}))
    assert history.live == one
    assert history.saved.records[-1].seconds == {"commit": 0.01}
    second = History(path, 10)
    assert (second.live, second.previous) == (one, before)
    assert second.saved.reserved == history.saved.reserved
    assert second.next_epoch() > history.next_epoch() - 1
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    assert history.name_unsynced
    history.sync_name()
    assert synced == [str(tmp_path)]
    assert not history.name_unsynced
    history.amend(one.epoch, {"0": 1.0})
    monkeypatch.undo()
    commit(history, 3)
    assert History(path, 10).saved.records[1].seconds == {"commit": 0.01}
    assert [p.name for p in tmp_path.iterdir()] == ["h.json"]


@pytest.mark.parametrize("change", ["replicas", "slot given away", "another write", "another write fails"])
def test_what_has_changed_since_it_was_written_ahead_is_written_anew(tmp_path, monkeypatch, change):
    path = tmp_path / "h.json"
    history = History(path, 10)
    first = commit(history, 1)
    one = live(2, history.next_epoch())
    history.draft(one, record(one))
    said = record(one)
    match change:
        case "replicas":
            said = msgspec.structs.replace(said, replicas=7)
        case "slot given away":
            history.saved = msgspec.structs.replace(history.saved, previous=first)
        case "another write":
            history.remember(["below"])
        case _:
            with monkeypatch.context() as patched:
                _fill(patched)
                with pytest.raises(OSError, match="No space"):
                    history.remember(["below"])
    history.commit(one, said)
    found = History(path, 10)
    assert found.saved == history.saved
    assert found.live == one
    assert found.saved.records[-1] == said


def test_a_disk_that_takes_nothing_ahead_is_told_of_by_the_commit(tmp_path, monkeypatch):
    history = History(tmp_path / "h.json", 10)
    before = commit(history, 1)
    one = live(2, history.next_epoch())
    with monkeypatch.context() as patched:
        _fill(patched)
        history.draft(one, record(one))
        with pytest.raises(OSError, match="No space"):
            history.commit(one, record(one))
    assert history.live == before
    history.commit(one, record(one))
    assert History(tmp_path / "h.json", 10).live == one


def _fill(patched):
    """Have the disk take nothing."""

    def full(path, content, *, synced=True):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for writes in (module, whole_file):
        patched.setattr(writes, "write_beside", full)


def test_an_epoch_never_comes_twice_even_if_its_commit_was_never_written(tmp_path):
    path = tmp_path / "h.json"
    seen = set()
    for _ in range(3):
        history = History(path, 10)
        for _ in range(RESERVE + 5):
            epoch = history.next_epoch()
            assert epoch not in seen
            assert epoch > max(seen, default=0)
            seen.add(epoch)


def test_a_commit_that_cannot_be_written_did_not_happen(tmp_path, monkeypatch):
    history = History(tmp_path / "h.json", 10)
    before = commit(history, 1)

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        commit(history, 2)
    monkeypatch.undo()
    assert history.live == before
    assert History(tmp_path / "h.json", 10).live == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["h.json"]
    assert commit(history, 2).version == 2


def test_what_is_not_synced_is_written_ahead_too_and_only_changes_names_at_the_commit(tmp_path, monkeypatch):
    history = History(tmp_path / "h.json", 10)
    monkeypatch.setattr(history, "synced", False)
    before = commit(history, 1)
    given_up, one = live(2, history.next_epoch()), live(3, history.next_epoch())
    history.draft(given_up, record(given_up))  # and nothing came of it
    history.draft(one, record(one))
    assert History(tmp_path / "h.json", 10).live == before
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda *_: pytest.fail("written while everybody waits"))
        patched.setattr(os, "fsync", lambda *_: pytest.fail("synced"))
        history.commit(one, msgspec.structs.replace(record(one), time=2.5))
    assert not history.name_unsynced
    second = History(tmp_path / "h.json", 10)
    assert (second.live, second.previous) == (one, before)
    assert commit(history, 4) == History(tmp_path / "h.json", 10).live


def test_a_line_that_is_over_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("weight_manager.adapters.line.in_memory", lambda folder: True)
    shape, folder = AdapterShape("float32", (AdapterModule("q", 1, 1.0),)), tmp_path / "adapters"
    folder.mkdir()
    history = LineHistory(folder / "a@1.json", 10, History(tmp_path / "weights.json", 10))
    history.begin("a", shape, tmp_path / "a.arena", "layout", [])
    commit(history, 1)
    commit(history, 2)
    history.remove()
    assert list(folder.iterdir()) == []


def test_the_log_is_capped_and_amended(tmp_path):
    history = History(tmp_path / "h.json", 3)
    for version in range(1, 6):
        newest = commit(history, version)
    assert [r["version"] for r in history.tail(10)] == [3, 4, 5]
    history.amend(newest.epoch, {"0": 2.5})
    assert history.tail(1)[0]["stall_ms"] == {"0": 2.5}
    commit(history, 6)
    assert History(tmp_path / "h.json", 3).tail(2)[0]["stall_ms"] == {"0": 2.5}


def test_a_new_arena_holds_nothing_but_versions_go_on(tmp_path):
    history = History(tmp_path / "h.json", 3)
    commit(history, 9)
    history.moved(tmp_path / "new.arena", "layout")
    assert (history.live, history.previous) == (None, None)
    assert history.last("run").version == 9


def test_going_back_by_force_makes_the_older_version_the_last(tmp_path):
    history = History(tmp_path / "h.json", 10)
    for version in (7, 3):
        commit(history, version)
    commit(history, 1, "another")
    assert history.last("run").version == 3


@pytest.mark.parametrize("content", [b"", b"{", b'{"records": 3}', b'{"format": 99}', b"\xff\xfe"])
def test_a_file_that_cannot_be_understood_stops_the_start(tmp_path, content):
    (tmp_path / "h.json").write_bytes(content)
    with pytest.raises(StartError, match="move it away"):
        History(tmp_path / "h.json", 3)


def test_what_lies_in_the_file_is_what_is_live_though_its_directory_cannot_be_synced(tmp_path, monkeypatch):
    """Once the file is replaced every later life reads the new one: a commit must not be undone in memory alone."""
    history = History(tmp_path / "h.json", 10)
    commit(history, 1)
    sync, replaced = os.fsync, []

    def no_directory(fd):
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            replaced.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(fd)

    monkeypatch.setattr(os, "fsync", no_directory)
    newest = commit(history, 2)
    assert replaced
    assert history.live == newest == History(tmp_path / "h.json", 10).live


def test_a_directory_that_cannot_be_opened_is_found_out_before_anything_is_replaced(tmp_path, monkeypatch):
    history = History(tmp_path / "h.json", 10)
    before = commit(history, 1)
    opened = os.open

    def none_left(path, flags, *args, **kwargs):
        if flags & os.O_DIRECTORY:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        commit(history, 2)
    monkeypatch.undo()
    assert history.live == before == History(tmp_path / "h.json", 10).live
    assert sorted(p.name for p in tmp_path.iterdir()) == ["h.json"]


@pytest.fixture
def syncs(monkeypatch):
    """How often something was synced."""
    seen = []
    monkeypatch.setattr(os, "fsync", seen.append)
    return seen


def test_a_commit_of_the_model_is_on_the_disk_before_it_returns(tmp_path, syncs):
    history = History(tmp_path / "weights.json", 10)
    history.next_epoch()
    syncs.clear()
    commit(history, 1)
    assert len(syncs) == 2  # the file, and its name


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_record_of_an_adapter_need_not_outlive_its_arena(tmp_path, syncs, monkeypatch, where):
    """A machine that loses power loses an arena in memory: nobody waits for the disk then."""
    monkeypatch.setattr("weight_manager.adapters.line.in_memory", lambda folder: folder == tmp_path / "memory")
    path, shape = tmp_path / "a.json", AdapterShape("float32", (AdapterModule("q", 1, 1.0),))
    history = LineHistory(path, 10, History(tmp_path / "weights.json", 10))
    history.begin("a", shape, tmp_path / where / "a.arena", "layout", [])
    first, second = live(1, 1), live(2, 2)
    syncs.clear()
    history.commit(first, record(first))
    again = LineHistory(path, 10, history)
    assert again.live == first  # any process finds it
    again.commit(second, record(second))
    assert len(syncs) == (0 if where == "memory" else 4)


def test_what_lies_in_memory_is_told_by_the_mounts(tmp_path):
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"

    def said(*kinds):
        mounts.write_text("".join(f"7 1 {number} / /x rw shared:1 - {kind} none rw\n" for kind in kinds))
        return in_memory(tmp_path, mounts)

    assert said("tmpfs")
    assert said("tmpfs", "tmpfs")
    assert not said("ext4")
    assert not said("tmpfs", "overlay")
    assert not said()
    mounts.write_text("what is\nthis\n")
    assert not in_memory(tmp_path, mounts)
    mounts.unlink()
    assert not in_memory(tmp_path, mounts)
    assert not in_memory(tmp_path / "nothing")
    assert in_memory(Path("/dev/shm"))


@pytest.mark.parametrize("content", [b"", b"\0" * 40, b'{"run_id": "\xff\xfe", "arena": "\xff"}'])
def test_a_damaged_history_is_said_in_words(tmp_path, content):
    (tmp_path / "h.json").write_bytes(content)
    with pytest.raises(StartError, match=r"cannot be read.*move it away"):
        History(tmp_path / "h.json", 10)
