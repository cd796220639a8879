"""A version's file follows what is live: it is written again after a failure, and is gone with what was unloaded."""

import errno
from types import SimpleNamespace

import pytest

import weight_manager.snapshot
from tests.faults.small_model import LAYOUT
from weight_manager.config import StoreConfig
from weight_manager.history import Saved
from weight_manager.layout import region_digests, version_digest
from weight_manager.messages import Live
from weight_manager.metrics import Counters
from weight_manager.snapshot import RETRY_S, Snapshots, read_adapter_head, read_head

MEMORY = memoryview(bytes(range(256)) * (LAYOUT.slot_bytes // 256))
LIVE = Live("run", 3, 70, 0, version_digest(LAYOUT, region_digests(LAYOUT, MEMORY)))


class Files:
    """Stands for the thread of the store's files: what waits is done when a test says so."""

    def __init__(self):
        self.waiting = []

    def submit(self, work, done, failed):
        self.waiting.append((work, done, failed))

    def work(self):
        """The thread does what waits; returns what the loop hears of it."""
        heard = []
        for work, done, failed in self.waiting:
            try:
                result = work()
            except OSError as error:
                heard.append(lambda failed=failed, error=error: failed(error))
            else:
                heard.append(lambda done=done, result=result: done(result))
        self.waiting.clear()
        return heard


@pytest.fixture
def saving(tmp_path, monkeypatch):
    """Makes those of one name, all with the same thread, at a time that a test sets."""
    files, clock = Files(), SimpleNamespace(now=100.0)
    monkeypatch.setattr(weight_manager.snapshot, "monotonic", lambda: clock.now)
    config = StoreConfig(run_dir=tmp_path, model=tmp_path, snapshot=True)
    path, counters = tmp_path / "policy.weights", Counters()
    slots = SimpleNamespace(arena=SimpleNamespace(slot=lambda number: MEMORY), enter=id, leave=id)

    def make():
        parts = {"saved": Saved(adapter="policy"), "slots": slots, "files": files, "counters": counters}
        return Snapshots(config, LAYOUT, path, **parts)

    return SimpleNamespace(make=make, files=files, path=path, clock=clock, counters=counters)


def told(heard):
    for call in heard:
        call()


def test_what_is_unloaded_is_gone_at_once(saving):
    """Not when the thread has time for it, which may write another file for minutes: a store that is told to stop, or
    dies, meanwhile had its next life serve what nobody is to be served with.
    """
    snapshots = saving.make()
    snapshots.follow(LIVE)
    told(saving.files.work())
    assert read_head(saving.path, LAYOUT) == LIVE
    snapshots.remove()
    assert not saving.path.exists()


@pytest.mark.parametrize("when", ["waits", "is written", "is written and not heard of"])
def test_what_is_unloaded_while_it_is_saved_is_gone_too(saving, monkeypatch, when):
    snapshots, replace = saving.make(), type(saving.path).replace

    def replaced(scratch, path):
        replace(scratch, path)
        snapshots.remove()
        replace_again = scratch.with_name("late")  # the loop was first: the thread's file came after it
        replace_again.write_bytes(b"late")
        replace(replace_again, path)

    snapshots.follow(LIVE)
    if when == "waits":
        snapshots.remove()
    if when == "is written":
        monkeypatch.setattr(type(saving.path), "replace", replaced)
    heard = saving.files.work()
    if when == "is written and not heard of":
        snapshots.remove()
    assert not saving.path.exists()
    told(heard)
    assert not [path for path in saving.path.parent.iterdir() if "weights" in path.name]


def test_the_next_adapter_of_a_name_is_saved_whatever_becomes_of_the_one_before(saving):
    before = saving.make()
    before.follow(LIVE)
    before.remove()
    after = saving.make()
    after.follow(LIVE)
    heard = saving.files.work()
    assert saving.path.exists()
    told(heard)
    assert read_head(saving.path, LAYOUT) == LIVE


def test_a_version_that_could_not_be_saved_is_tried_again_after_a_while(saving, monkeypatch):
    """Nothing else may go live for hours: a disk that was full for a moment left the version before it there."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    snapshots = saving.make()
    monkeypatch.setattr(weight_manager.snapshot, "write_snapshot", full)
    snapshots.follow(LIVE)
    told(saving.files.work())
    assert saving.counters.values()["snapshots_failed"] == 1
    monkeypatch.undo()
    monkeypatch.setattr(weight_manager.snapshot, "monotonic", lambda: saving.clock.now)
    saving.clock.now += RETRY_S - 1
    snapshots.follow(LIVE)
    assert not saving.files.waiting
    saving.clock.now += 1
    snapshots.follow(LIVE)
    told(saving.files.work())
    assert read_head(saving.path, LAYOUT) == LIVE
    snapshots.follow(LIVE)
    assert not saving.files.waiting


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b'{"layout": "\xff\xfe", "adapter": "\xff"}'])
def test_a_damaged_file_is_not_used(tmp_path, caplog, content):
    path = tmp_path / "snapshot"
    path.write_bytes(content)
    assert read_head(path, LAYOUT) is None
    assert read_adapter_head(path) is None
    assert caplog.text.count("cannot be read") == 2
