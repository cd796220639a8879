"""Adapters in the scheduler: who computes with which version, what becomes of them in an update, what spans say."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from worker.messages import Span

MakeRig = Callable[..., Any]
PROMPT = list(range(1, 10))


def spans(replica: Any, request_id: str, index: int = 0) -> list[tuple[int, int | None, int, int, bool]]:
    """(version, adapter's version, start, end, recomputed) of each; every token follows from them."""
    replica.check_replay(request_id, index)
    return [
        (span.version, span.adapter_version, span.start, span.end, span.recomputed)
        for span in replica.results[request_id, index].spans
    ]


def test_a_step_has_everybodys_adapter(rig: MakeRig) -> None:
    replica = rig(max_tokens=64)
    replica.adapter("a", 5)
    replica.adapter("b", 9)
    for request_id, adapter in (("base", ""), ("of a", "a"), ("of b", "b"), ("also a", "a")):
        replica.add(request_id, PROMPT, max_tokens=6, temperature=0.0, adapter=adapter)
    replica.run()
    epochs = {name: live.epoch for name, live in replica.scheduler.adapters.items()}
    assert len(replica.batches[0].adapters) == 3  # who shares a prompt with another waits for its blocks
    for batch in replica.batches[2:-1]:
        assert sorted(batch.adapters.tolist()) == sorted([0, epochs["a"], epochs["b"], epochs["a"]])
    assert spans(replica, "base") == [(0, None, 0, 6, False)]
    assert spans(replica, "of a") == spans(replica, "also a") == [(0, 5, 0, 6, False)]
    assert spans(replica, "of b") == [(0, 9, 0, 6, False)]
    tokens = [replica.results[request_id, 0].tokens for request_id in ("base", "of a", "of b")]
    assert tokens[0] != tokens[1] != tokens[2] != tokens[0]


def test_nothing_is_said_of_adapters_where_nobody_has_one(rig: MakeRig) -> None:
    replica = rig()
    replica.adapter("a", 5)
    replica.add("x", PROMPT, max_tokens=12, temperature=0.0)
    replica.add("of a", PROMPT, max_tokens=3, temperature=0.0, adapter="a")
    replica.run()
    adapted = [len(batch.adapters) for batch in replica.batches]
    assert adapted == sorted(adapted, reverse=True)
    assert adapted[0] == 2
    assert adapted.count(0) > 5


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("keep", [(0, 1, 0, 3, False), (0, 2, 3, 8, False)]),
        ("wait", [(0, 1, 0, 3, False), (0, 2, 3, 8, False)]),
        ("recompute", [(0, 1, 0, 3, False), (0, 2, 3, 8, True)]),
        ("finish", [(0, 1, 0, 8, False)]),
        ("abort", [(0, 1, 0, 3, False)]),
    ],
)
def test_an_update_of_an_adapter_is_its_own_sequences_business(rig: MakeRig, policy: str, expected: Any) -> None:
    replica = rig(max_tokens=64)
    replica.adapter("a", 1)
    replica.adapter("b", 1)
    for request_id, adapter in (("base", ""), ("of a", "a"), ("of b", "b")):
        replica.add(request_id, PROMPT, max_tokens=8, temperature=0.0, adapter=adapter, stream=True)
    for _ in range(3):
        replica.step()
    replica.adapter("a", 2, policy)
    replica.add("new", PROMPT, max_tokens=2, temperature=0.0, adapter="a")
    replica.run()
    assert spans(replica, "of a") == expected
    assert (replica.results["of a", 0].finish == "abort") == (policy == "abort")
    assert spans(replica, "new") == [(0, 2, 0, 2, False)]
    assert spans(replica, "base") == [(0, None, 0, 8, False)]
    assert spans(replica, "of b") == [(0, 1, 0, 8, False)]


def test_a_span_begins_with_either_kind_of_update(rig: MakeRig) -> None:
    replica = rig()
    replica.adapter("a", 1)
    replica.add("x", PROMPT, max_tokens=9, temperature=0.0, adapter="a")
    replica.add("base", PROMPT, max_tokens=9, temperature=0.0)
    for change in (lambda: replica.update("keep", 1), lambda: replica.adapter("a", 2), lambda: replica.adapter("a", 2)):
        for _ in range(2):
            replica.step()
        change()
    replica.run()
    # The same number is another version of it where it was pushed again: another epoch.
    assert [span[:2] for span in spans(replica, "x")] == [(0, 1), (1, 1), (1, 2), (1, 2)]
    assert [span[:2] for span in spans(replica, "base")] == [(0, None), (1, None)]


def test_who_finishes_with_its_version_is_computed_again_with_it(rig: MakeRig) -> None:
    replica = rig(max_batch=1)
    replica.adapter("a", 1)
    replica.add("x", PROMPT, max_tokens=9, temperature=0.0, adapter="a")
    for _ in range(3):
        replica.step()
    replica.adapter("a", 2, "finish")
    assert len(replica.scheduler.adapter_epochs()) == 1
    replica.add("urgent", PROMPT, max_tokens=2, temperature=0.0, adapter="a", priority=-1)
    replica.step()
    assert replica.scheduler.counters["preempted"] == 1
    assert len(replica.scheduler.adapter_epochs()) == 2
    assert replica.scheduler.adapter_running("a") == 2
    replica.run()
    assert spans(replica, "x") == [(0, 1, 0, 9, False)]
    assert spans(replica, "urgent") == [(0, 2, 0, 2, False)]


def test_what_has_no_token_yet_begins_anew(rig: MakeRig) -> None:
    replica = rig(max_tokens=8, max_batch=4)
    replica.adapter("a", 1)
    replica.add("x", list(range(1, 25)), max_tokens=3, n=2, seed=1, adapter="a", prompt_logprobs=1)
    replica.step()
    replica.adapter("a", 2, "keep")
    replica.run()
    assert spans(replica, "x") == [(0, 2, 0, 3, False)]
    assert spans(replica, "x", 1) == [(0, 2, 0, 3, False)]


def test_the_prefix_cache_is_an_adapters_own(rig: MakeRig) -> None:
    replica = rig(max_tokens=64)
    replica.adapter("a", 1)
    replica.adapter("b", 1)

    def cached(request_id: str, adapter: str) -> int:
        replica.add(request_id, PROMPT, max_tokens=2, temperature=0.0, adapter=adapter)
        replica.run()
        replica.check_replay(request_id)
        tokens: int = replica.results[request_id, 0].last.cached_tokens
        return tokens

    assert [cached("1", "a"), cached("2", "a"), cached("3", ""), cached("4", "b"), cached("5", "")] == [0, 8, 0, 0, 8]
    replica.adapter("a", 2)
    assert [cached("6", "a"), cached("7", "a"), cached("8", "b"), cached("9", "")] == [0, 8, 8, 8]
    replica.update("keep", 1)
    assert [cached("10", "a"), cached("11", "b"), cached("12", "b")] == [0, 0, 8]


def test_what_two_versions_computed_is_not_offered(rig: MakeRig) -> None:
    replica = rig(max_tokens=64)
    replica.adapter("a", 1)
    replica.add("x", PROMPT, max_tokens=20, temperature=0.0, adapter="a")
    for _ in range(3):
        replica.step()
    replica.adapter("a", 2, "keep")
    replica.run()
    replica.add("warms", PROMPT, max_tokens=1, temperature=0.0, adapter="a")
    replica.run()
    replica.add("goes on", PROMPT + replica.results["x", 0].tokens, max_tokens=3, temperature=0.0, adapter="a")
    replica.run()
    assert spans(replica, "goes on") == [(0, 2, 0, 3, False)]
    assert replica.results["goes on", 0].last.cached_tokens == 8


def test_nothing_of_a_held_adapter_begins_and_others_pass(rig: MakeRig) -> None:
    replica = rig(max_batch=2)
    replica.adapter("a", 1)
    replica.scheduler.hold_adapter("a", True)
    replica.add("x", PROMPT, max_tokens=3, temperature=0.0, adapter="a", priority=-1)
    replica.add("base", PROMPT, max_tokens=3, temperature=0.0)
    while replica.step():
        pass
    assert ("base", 0) in replica.results
    assert ("x", 0) not in replica.results
    assert replica.scheduler.adapter_running("a") == 0
    replica.adapter("a", 2, "wait")
    replica.scheduler.hold_adapter("a", False)
    replica.run()
    assert spans(replica, "x") == [(0, 2, 0, 3, False)]


def test_an_unloaded_adapter_is_computed_with_to_the_end(rig: MakeRig) -> None:
    replica = rig(max_batch=1)
    replica.adapter("a", 1)
    replica.add("begun", PROMPT, max_tokens=5, temperature=0.0, adapter="a")
    replica.add("waits", PROMPT, max_tokens=5, temperature=0.0, adapter="a", n=2)
    replica.step()
    replica.unload("a")
    for index in (0, 1):
        chunk = replica.results["waits", index].last
        assert (chunk.finish, chunk.error, chunk.fault) == ("error", "adapter 'a' is not loaded", "adapter")
    replica.add("late", PROMPT, max_tokens=5, temperature=0.0, adapter="a")  # it was held while the adapter went
    replica.run()
    assert spans(replica, "begun") == [(0, 1, 0, 5, False)]
    assert replica.results["late", 0].finish == "error"
    assert replica.scheduler.adapter_epochs() == set()


def test_an_output_without_a_token_is_of_what_it_would_have_begun_with(rig: MakeRig) -> None:
    replica = rig()
    replica.adapter("a", 7)
    replica.add("empty", PROMPT, max_tokens=0, adapter="a")
    replica.step()
    replica.add("aborted", PROMPT, max_tokens=3, adapter="a")
    replica.scheduler.abort(["aborted"])
    replica.collect()
    for request_id in ("empty", "aborted"):
        assert replica.results[request_id, 0].spans == [Span(0, 0, 0, adapter_version=7)]


def test_drafts_are_judged_with_the_adapter(rig: MakeRig) -> None:
    replica = rig(speculative=True, max_tokens=16)
    replica.adapter("a", 1)
    replica.add("x", PROMPT, max_tokens=12, temperature=0.0, adapter="a")
    for _ in range(4):
        replica.step()
    replica.adapter("a", 2, "keep")
    replica.run()
    assert [span[:2] for span in spans(replica, "x")] == [(0, 1), (0, 2)]
    assert replica.scheduler.counters["spec_drafted"] > 0


@pytest.mark.parametrize("after", [1, 2, 3, 5])
@pytest.mark.parametrize("policy", ["gone", "finish", "keep", "abort"])
def test_samples_that_have_no_seat_yet_are_of_a_request_that_has_begun(rig: MakeRig, after: int, policy: str) -> None:
    """n samples over fewer seats: all of them end, whatever becomes of the adapter while some wait."""
    replica = rig(max_batch=2, max_tokens=64)
    replica.adapter("a", 1)
    replica.add("x", PROMPT, n=5, max_tokens=4, temperature=0.0, adapter="a")
    for _ in range(after):
        replica.step()
    if policy == "gone":
        replica.scheduler.adapter_gone("a")
    else:
        replica.adapter("a", 2, policy)
    replica.run()
    assert {replica.results["x", index].finish for index in range(5)} <= {"length", "abort"}


@pytest.mark.parametrize("after", [0, 1, 3])
def test_logits_that_are_not_finite_are_said_to_be_the_adapters_too(rig: MakeRig, after: int) -> None:
    replica = rig()
    replica.adapter("a", 5)
    replica.add("of a", PROMPT, max_tokens=9, temperature=0.0, adapter="a")
    for _ in range(after):
        replica.step()
    logits = replica.engine.forward(replica.schedule())
    logits[0, 3] = np.nan
    replica.scheduler.apply(logits)
    replica.run()
    last = replica.results["of a", 0].last
    assert (last.finish, last.fault) == ("error", "")
    assert "weight version 0 and version 5 of adapter a are not finite" in last.error
