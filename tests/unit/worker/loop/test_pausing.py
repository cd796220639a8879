import time

import pytest

from weight_manager import messages as store
from worker.messages import Abort, CallFailed, Clear, Done, Drain, Pause, Reload, Resume, StateChanged


@pytest.fixture
def busy(make_rig):
    """Serving, with one long request under way."""
    rig = make_rig(fake={"step_s": 0.01})
    rig.serve()
    rig.api.generate("long", max_tokens=60)
    rig.api.until(lambda: rig.api.tokens("long") > 2)
    return rig


def stands_still(rig, request_id):
    rig.api.pump(0.05)
    before = rig.api.tokens(request_id)
    time.sleep(0.1)
    rig.api.pump(0)
    return rig.api.tokens(request_id) == before


@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize("clear_cache", [True, False])
def test_what_runs_stands_still_and_goes_on(busy, mode, clear_cache):
    assert isinstance(busy.api.call(Pause, mode, clear_cache=clear_cache), Done)
    assert busy.api.stats().state == "paused"
    assert stands_still(busy, "long")
    busy.api.generate("late", max_tokens=4)
    busy.api.until(lambda: busy.api.stats().held == 1)
    assert isinstance(busy.api.call(Resume), Done)
    tokens, _, finish = busy.api.finish("long")
    assert (len(tokens), finish) == (60, "length")
    busy.api.finish("late")
    busy.check(busy.api, "long")
    busy.check(busy.api, "late")


def test_abort_ends_what_runs_with_its_partial_result_and_holds_what_comes(busy):
    done = busy.api.call(Pause, "abort")
    assert done.data["aborted"] == 1
    tokens, _, finish = busy.api.finish("long")
    assert finish == "abort"
    assert len(tokens) > 2
    busy.check(busy.api, "long")
    busy.api.generate("late", max_tokens=4)
    busy.api.until(lambda: busy.api.stats().held == 1)
    assert busy.api.call(Pause, "abort").data["held"] == 1  # a second pause ends nobody who waits for the resume
    busy.api.call(Resume)
    assert busy.api.finish("late")[2] == "length"


def test_wait_lets_what_runs_finish_and_holds_what_comes(busy):
    call = busy.api.start(Pause, "wait")
    busy.api.generate("late", max_tokens=4)
    done = busy.api.answer(call)
    assert isinstance(done, Done)
    assert busy.api.finished("long")
    assert busy.api.result("long")[2] == "length"
    assert not busy.api.finished("late")
    assert busy.api.stats().state == "paused"
    busy.api.call(Resume)
    busy.api.finish("late")


def test_wait_past_its_deadline_is_undone_and_says_so(busy):
    failed = busy.api.call(Pause, "wait", deadline_s=0.1)
    assert (type(failed), failed.code) == (CallFailed, "timeout")
    assert busy.api.stats().state == "serving"
    assert busy.api.finish("long")[2] == "length"


def test_an_abort_while_a_wait_drains_lets_it_end(busy):
    call = busy.api.start(Pause, "wait")
    busy.api.call(Abort, ["long"])
    assert isinstance(busy.api.answer(call), Done)


def test_a_resume_ends_a_wait_that_has_not_drained(busy):
    call = busy.api.start(Pause, "wait")
    assert isinstance(busy.api.call(Resume), Done)
    assert busy.api.answer(call).code == "conflict"
    assert busy.api.stats().state == "serving"


def test_a_second_pause_replaces_a_wait(busy):
    call = busy.api.start(Pause, "wait")
    assert isinstance(busy.api.call(Pause, "keep", clear_cache=False), Done)
    assert busy.api.answer(call).code == "conflict"
    assert stands_still(busy, "long")


def test_a_wait_on_what_stands_still_is_a_conflict(busy):
    busy.api.call(Pause, "keep")
    assert busy.api.call(Pause, "wait").code == "conflict"


def test_aborts_work_while_paused(busy):
    busy.api.call(Pause, "keep")
    busy.api.generate("held", n=2)
    assert busy.api.call(Abort, ["long", "held"]).data == {"aborted": 2}
    assert busy.api.finish("long")[2] == "abort"
    busy.api.until(lambda: len(busy.api.chunks["held"]) == 2)
    assert [(c.index, c.finish, c.token_ids) for c in busy.api.chunks["held"]] == [(0, "abort", []), (1, "abort", [])]
    busy.check(busy.api, "long")
    assert busy.api.stats().held == 0


def test_a_lease_resumes_by_itself_and_says_so(busy):
    busy.api.stats()  # subscribes
    busy.api.call(Pause, "keep", lease_s=0.2)
    busy.api.finish("long")
    changes = [m for m in busy.api.announced if isinstance(m, StateChanged)]
    assert [c.state for c in changes] == ["paused", "serving"]
    assert "lease of 0.2 s ran out" in changes[-1].reason
    assert busy.api.stats().counters["leases_expired"] == 1


def test_statistics_say_what_is_left_of_a_lease(busy):
    """An API that is restarted in the pause knows its end from nobody else."""
    assert busy.api.stats().pause_left_s is None
    busy.api.call(Pause, "keep", lease_s=60.0)
    assert 0.0 < busy.api.stats().pause_left_s <= 60.0
    busy.api.call(Pause, "keep")
    assert busy.api.stats().pause_left_s is None, "this one ends when somebody resumes"


def test_a_later_pause_brings_its_own_lease(busy):
    busy.api.call(Pause, "keep", lease_s=0.1)
    busy.api.call(Pause, "keep")
    time.sleep(0.2)
    assert busy.api.stats().state == "paused"


def test_resume_without_a_pause_is_a_clean_answer(rig):
    rig.serve()
    assert isinstance(rig.api.call(Resume), Done)


def test_a_pause_before_the_first_version_holds_after_it(rig):
    assert isinstance(rig.api.call(Pause, "keep"), Done)
    rig.store.register(rig.store.write(0, 0))
    rig.api.until(lambda: rig.api.stats().state == "paused")
    rig.api.generate("a")
    rig.api.until(lambda: rig.api.stats().held == 1)
    rig.api.call(Resume)
    rig.api.finish("a")


def test_a_pause_outlives_clear_and_reload(rig):
    rig.serve()
    rig.api.call(Pause, "keep")
    rig.api.call(Clear)
    assert rig.api.stats().state == "cleared"
    assert isinstance(rig.api.call(Reload), Done)
    assert rig.api.stats().state == "paused"
    rig.api.call(Resume)
    assert rig.api.stats().state == "serving"


def test_drain_finishes_what_runs_refuses_what_comes_and_ends(busy):
    call = busy.api.start(Drain, 5.0)
    busy.api.generate("late")
    refused = busy.api.answer("late")
    assert (refused.code, "draining" in refused.message) == ("conflict", True)
    assert isinstance(busy.api.answer(call), Done)
    assert busy.api.result("long")[2] == "length"
    busy._thread.join(30)
    assert not busy._thread.is_alive()
    assert busy.store.expect(store.Leaving), "the store takes its end for a death"


def test_drain_aborts_at_its_deadline(busy):
    assert isinstance(busy.api.call(Drain, 0.1), Done)
    assert busy.api.result("long")[2] == "abort"


def test_drain_sends_held_requests_elsewhere(busy):
    busy.api.call(Pause, "abort")
    busy.api.generate("held")
    busy.api.until(lambda: busy.api.stats().held == 1)
    busy.api.start(Drain, 5.0)
    assert busy.api.answer("held").code == "conflict"


def test_too_many_held_are_refused(make_rig):
    rig = make_rig(max_held=1)
    rig.api.generate("a")
    rig.api.generate("b")
    assert rig.api.answer("b").code == "conflict"
    rig.serve()
    rig.api.finish("a")
