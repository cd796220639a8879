import gc
import logging
import threading
import time
from pathlib import Path

import msgspec
import pytest

from weight_manager import messages as store_messages
from weight_manager.arena import Arena
from weight_manager.messages import (
    Adopt,
    Adopted,
    Finalize,
    Flipped,
    Prepared,
    Registered,
)
from worker import calls
from worker.messages import Clear, Done, Pause, Reload, Resume

PROMPT = [1, 2, 3, 4] * 10


def test_adopt_outside_a_push(rig):
    rig.serve()
    newer = rig.store.write(5, 1)
    rig.store.send(Adopt(newer))
    assert rig.store.expect(Adopted) == Adopted(newer.epoch)
    rig.api.generate("a")
    rig.api.finish("a")
    assert rig.versions("a") == [5]
    rig.check(rig.api, "a")


def test_adopt_of_a_slot_with_other_bytes_is_refused_and_tried_again(rig):
    first = rig.serve()
    newer = rig.store.write(5, 1)
    rig.arena.slot(1)[0:4] = b"\0\0\0\1"
    rig.store.send(Adopt(newer))
    answer = rig.store.expect(Adopted)
    assert not answer.ok
    assert "digest" in answer.error
    rig.api.generate("a")
    rig.api.finish("a")
    assert rig.versions("a") == [0]
    rig.store.register(first)  # it asks again by itself


@pytest.mark.parametrize("commit", ["before", "flipped"])
def test_a_store_without_its_history_is_followed_though_its_epochs_come_again(rig, commit):
    """It was moved away: another version has the epoch of what is held, or of what the ranks have flipped to."""
    old = rig.serve()
    rig.api.generate("a", prompt=PROMPT)
    rig.api.finish("a")
    if commit == "flipped":
        old = rig.store.write(1, 1)
        rig.store.prepare("s1", old)
        rig.store.flip("s1")
    rig.store.close()
    rig.store.open()
    if commit == "flipped":
        rig.store.arena = other = Arena.create(rig.run_dir, "other", rig.layout.slot_bytes)
        rig.store.arena_path = str(other.path)
    new = msgspec.structs.replace(rig.store.write(5, 1), epoch=old.epoch)
    rig.store.register(new)
    rig.api.generate("b", prompt=PROMPT)
    rig.api.finish("b")
    assert rig.versions("b") == [5]
    assert {span.digest for span in rig.api.result("b")[1]} == {new.digest}
    assert {chunk.cached_tokens for chunk in rig.api.chunks["b"]} == {0}
    rig.check(rig.api, "b", prompt=PROMPT)


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_an_arena_that_is_refused_again_and_again_is_let_go_each_time(rig, caplog):
    caplog.set_level(logging.CRITICAL + 1, "worker.orders")  # records keep tracebacks, and those what was mapped
    first = rig.serve()
    other = Arena.create(rig.run_dir, "other", rig.layout.slot_bytes)
    counts = []
    gc.collect()  # sockets of the tests before are not to be let go in between
    for _ in range(3):
        rig.store.send(Registered(str(other.path), msgspec.structs.replace(first, epoch=9), 1.0))
        assert not rig.store.expect(Adopted).ok
        counts.append(descriptors())
    assert counts == [counts[0]] * 3
    rig.api.generate("a")
    rig.api.finish("a")
    rig.check(rig.api, "a")
    other.close(unlink=True)


def test_a_version_for_which_there_is_no_thread_is_refused_and_the_next_is_taken(busy, monkeypatch):
    start, refused = threading.Thread.start, []

    def start_or_not(thread):
        if thread.name == "work" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_not)
    vote = busy.store.prepare("s", busy.store.write(1, 1))
    assert not vote.ok
    assert "can't start new thread" in vote.error
    busy.store.push("t", busy.store.write(2, 1))
    assert busy.error is None


def test_a_commit_while_paused_is_taken(busy):
    busy.api.call(Pause, "keep", clear_cache=False)
    busy.store.push("s1", busy.store.write(1, 1))
    assert busy.api.stats().state == "paused"
    assert busy.api.stats().version == 1
    busy.api.call(Resume)
    busy.api.finish("long")
    busy.check(busy.api, "long")


def test_wait_policy_while_paused_with_sequences_is_voted_down(busy):
    busy.api.call(Pause, "keep")
    vote = busy.store.prepare("s1", busy.store.write(1, 1), "wait")
    assert not vote.ok
    assert "stand still" in vote.error


def test_cleared_replicas_follow_commits_and_reload_the_latest(busy):
    released = busy.api.call(Clear).data["released"]
    assert released[0]["weights"] > 0
    assert released[0]["kv_cache"] > 0
    assert busy.api.stats().version is None
    busy.store.push("s1", busy.store.write(1, 1))
    busy.store.push("s2", busy.store.write(2, 0))
    assert busy.api.stats().state == "cleared"
    busy.api.call(Reload)
    assert (busy.api.stats().state, busy.api.stats().version) == ("serving", 2)
    busy.api.finish("long")
    assert busy.versions("long") == [0, 2]
    busy.check(busy.api, "long")


def test_clear_between_prepare_and_flip(busy):
    live = busy.store.write(1, 1)
    busy.store.prepare("s1", live)
    busy.api.call(Clear)
    reload = busy.api.start(Reload)  # must not map the old version now
    assert busy.store.flip("s1").ok
    busy.store.send(Finalize("s1"))
    busy.store.expect(store_messages.Finalized)
    busy.api.answer(reload)
    assert busy.api.stats().version == 1
    busy.api.finish("long")
    busy.check(busy.api, "long")


@pytest.mark.parametrize("tags", [("kv_cache",), ("weights", "kv_cache")])
def test_a_commit_that_waits_for_sequences_lets_their_memory_come_back(busy, tags):
    """They could not end without it: the commit would wait for them, and the reload for the commit."""
    busy.store.send(store_messages.Prepare("s1", busy.store.write(1, 1), "wait", 20.0))
    busy.api.call(Clear, tags)
    assert isinstance(busy.api.call(Reload, tags), Done)
    assert busy.api.finish("long")[2] == "length"
    assert busy.store.expect(Prepared) == Prepared("s1")
    assert busy.store.flip("s1") == Flipped("s1")
    busy.store.send(Finalize("s1"))
    busy.store.expect(store_messages.Finalized)
    assert (busy.api.stats().state, busy.api.stats().version) == ("serving", 1)
    busy.check(busy.api, "long")


def test_a_commit_that_comes_between_two_phases_of_a_reload_waits_for_its_end(busy):
    busy.api.call(Clear)
    groups = busy.loop._actions._groups
    entered, go_on = threading.Event(), threading.Event()

    def restart():
        entered.set()
        assert go_on.wait(30)
        return []

    groups.restart = restart
    reload = busy.api.start(Reload)
    assert entered.wait(30)
    busy.store.send(store_messages.Prepare("s1", busy.store.write(1, 1), "keep", 5.0))
    time.sleep(0.05)
    go_on.set()
    assert busy.store.expect(Prepared) == Prepared("s1")
    assert isinstance(busy.api.answer(reload), Done)
    assert busy.store.flip("s1") == Flipped("s1")
    busy.store.send(Finalize("s1"))
    busy.store.expect(store_messages.Finalized)
    busy.api.finish("long")
    assert busy.versions("long") == [0, 1]
    busy.check(busy.api, "long")


@pytest.fixture
def cleared_in_the_window(rig):
    """A replica that was cleared, and whose live version is not in its slot yet: it went live from a device."""
    live = rig.serve()
    rig.api.call(Clear)
    whole = bytes(rig.arena.slot(live.slot))
    rig.arena.slot(live.slot)[:4] = b"\0\0\0\1"

    def arrive():
        rig.arena.slot(live.slot)[:] = whole

    return rig, live, arrive


def test_a_reload_waits_until_the_arena_has_what_is_live(cleared_in_the_window):
    """The store says what is live once the arena has it, and nothing before."""
    rig, live, arrive = cleared_in_the_window
    reload = rig.api.start(Reload)
    rig.store.expect(store_messages.Register)
    rig.api.stats()  # it goes on meanwhile
    assert reload not in rig.api.answers
    arrive()
    rig.store.send(Registered(rig.store.arena_path, live, 1.0))
    assert isinstance(rig.api.answer(reload), Done)
    assert rig.api.stats().state == "serving"


def test_a_reload_for_which_the_arena_never_has_what_is_live_may_be_asked_for_again(cleared_in_the_window, monkeypatch):
    monkeypatch.setattr(calls, "_AGAIN_S", 0.2)
    rig, _, arrive = cleared_in_the_window
    failed = rig.api.answer(rig.api.start(Reload))
    assert (failed.code, "digest differs" in failed.message) == ("busy", True)
    arrive()
    assert isinstance(rig.api.call(Reload), Done)


def test_a_slot_that_stays_damaged_fails_a_reload(cleared_in_the_window):
    rig, live, _ = cleared_in_the_window
    reload = rig.api.start(Reload)
    rig.store.register(live)
    assert rig.api.answer(reload).code == "internal"


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_each_half_alone_is_cleared_and_reloaded(busy, tag):
    assert set(busy.api.call(Clear, (tag,)).data["released"][0]) == {tag}
    assert busy.api.call(Clear, (tag,)).data["released"][0] == {tag: 0}  # again: nothing left, a clean answer
    assert busy.api.stats().state == "cleared"
    busy.api.call(Reload)
    busy.api.call(Reload)
    assert busy.api.stats().state == "serving"
    busy.api.finish("long")
    busy.check(busy.api, "long")


def test_both_halves_are_needed_to_serve(rig):
    rig.serve()
    rig.api.call(Clear)
    rig.api.call(Reload, ("weights",))
    assert rig.api.stats().state == "cleared"
    rig.api.call(Reload, ("kv_cache",))
    assert rig.api.stats().state == "serving"


def test_requests_while_cleared_are_held(rig):
    rig.serve()
    rig.api.call(Clear)
    rig.api.generate("a")
    rig.api.until(lambda: rig.api.stats().held == 1)
    rig.api.call(Reload)
    rig.api.finish("a")
    rig.check(rig.api, "a")


def test_requests_while_cleared_are_refused_by_policy(make_rig):
    rig = make_rig(when_cleared="refuse")
    rig.serve()
    rig.api.call(Clear)
    rig.api.generate("a")
    assert rig.api.answer("a").code == "conflict"


def test_a_store_with_another_arena_is_followed(busy, tmp_path):
    from weight_manager.arena import Arena

    moved = Arena.create(busy.run_dir, "rig", busy.layout.slot_bytes)
    busy.store.close()
    old, busy.arena = busy.arena, moved
    busy.store.arena, busy.store.arena_path = moved, str(moved.path)
    old.close(unlink=True)
    busy.store.open()
    live = busy.store.write(7, 0)
    busy.store.register(live)
    busy.api.finish("long")
    assert busy.versions("long") == [0, 7]
    busy.check(busy.api, "long")


def test_an_engine_error_ends_its_batch_and_the_worker_goes_on(busy):
    engine = busy.loop._actions.engine
    forward, calls = engine.forward, []

    def broken(batch):
        calls.append(batch)
        if len(calls) == 1:
            raise RuntimeError("out of memory, say")
        return forward(batch)

    engine.forward = broken
    _, _, finish = busy.api.finish("long")
    assert finish == "error"
    assert "out of memory, say" in busy.api.chunks["long"][-1].error
    busy.check(busy.api, "long")
    busy.api.generate("next")
    busy.api.finish("next")
    busy.check(busy.api, "next")
    assert busy.api.stats().counters["engine_errors"] == 1
