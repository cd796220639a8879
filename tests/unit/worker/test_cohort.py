"""Sequences in arrays: nothing comes out that would not come out one by one, and a step costs the same for many."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.unit.worker.conftest import Result
from tests.unit.worker.test_scheduler_properties import actions, play
from worker.cohort import Cohort

POLICIES = ("keep", "keep", "recompute", "abort", "wait")


def _said(replica: Any) -> dict[Any, Any]:
    return {key: [*result.chunks] for key, result in replica.results.items()}


def _both(rig: Callable[..., Any], sizes: dict[str, Any], use: Callable[[Any], None]) -> tuple[Any, Any]:
    together, apart = rig(**sizes), rig(**sizes)
    use(together)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Cohort, "takes", lambda self, sequence: False)
        use(apart)
    return together, apart


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"num_blocks": 64, "max_tokens": 9}, id="roomy"),
        pytest.param({"num_blocks": 9, "max_model_len": 36, "max_batch": 3, "max_tokens": 5}, id="tight"),
    ],
)
def test_every_chunk_is_what_it_would_be_without(rig: Callable[..., Any], sizes: dict[str, Any]) -> None:
    @settings(
        max_examples=40,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(actions(*POLICIES))
    def check(played: list[Any]) -> None:
        together, apart = _both(rig, sizes, lambda replica: play(replica, played))
        assert _said(together) == _said(apart)
        counts = [dict(replica.scheduler.counters) for replica in (together, apart)]
        assert counts[0] == counts[1]
        samples = [{k: len(v) for k, v in r.scheduler.drain_samples().items()} for r in (together, apart)]
        assert samples[0] == samples[1]

    check()


@pytest.mark.parametrize("stream", [False, True])
def test_what_an_adapters_version_made_is_told_as_its_own_when_the_next_one_comes(
    rig: Callable[..., Any], stream: bool
) -> None:
    def use(replica: Any) -> None:
        replica.adapter("a", 1)
        for number in range(3):
            replica.add(str(number), [1 + number, 2], max_tokens=9, seed=number, stream=stream, adapter="a")
        for _ in range(5):
            replica.step()
        replica.adapter("a", 2)
        replica.run()
        replica.check_replay("1")

    together, apart = _both(rig, {}, use)
    assert _said(together) == _said(apart)
    assert [span.adapter_version for span in together.results["1", 0].last.spans] == [1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_long_outputs_outlast_what_is_kept_of_them(rig: Callable[..., Any], stream: bool) -> None:
    def use(replica: Any) -> None:
        for number in range(3):
            replica.add(str(number), [1 + number], max_tokens=600 + number, seed=number, stream=stream)
        replica.run()

    together, apart = _both(rig, {"max_model_len": 700, "num_blocks": 8, "block_size": 512}, use)
    assert _said(together) == _said(apart)
    assert len(together.results["2", 0].tokens) == 602


def test_cut_requests_are_in_step_too_and_drawn_the_same(rig: Callable[..., Any]) -> None:
    cuts = [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2, "temperature": 0.7}, {"temperature": 0.0, "top_k": 3}, {}]

    def use(replica: Any) -> None:
        for number, cut in enumerate(cuts):
            replica.add(str(number), [1 + number], max_tokens=30, seed=number, stream=number % 2 == 0, **cut)
        for _ in range(5):
            replica.step()
        in_step.append(len(replica.scheduler._cohort))
        replica.run()

    in_step: list[int] = []
    together, apart = _both(rig, {}, use)
    assert in_step == [len(cuts), 0]
    assert _said(together) == _said(apart)


@pytest.mark.parametrize("stream", [False, True])
def test_few_are_kept_one_by_one_and_more_in_arrays_as_they_come_and_go(rig: Callable[..., Any], stream: bool) -> None:
    def use(replica: Any) -> None:
        counts = []
        for number, length in enumerate((40, 30, 20, 10)):
            replica.add(str(number), [1 + number], max_tokens=length, seed=number, stream=stream)
        while replica.step():
            counts.append((len(replica.scheduler._batcher.running), len(replica.scheduler._cohort)))
        replica.run()
        in_arrays.append(counts)

    in_arrays: list[list[tuple[int, int]]] = []
    together, apart = _both(rig, {}, use)
    assert _said(together) == _said(apart)
    seen = dict(in_arrays[0])
    assert (seen[4], seen[3], seen[2], seen[1]) == (4, 3, 2, 0), "the last is alone"
    assert not any(kept for _, kept in in_arrays[1])


def test_what_stops_one_does_not_stop_another(rig: Callable[..., Any]) -> None:
    plain = rig()
    plain.add("a", [1, 2, 3], max_tokens=20, temperature=0.0)
    plain.run()
    stop = plain.results["a", 0].tokens[7]
    first = plain.results["a", 0].tokens.index(stop)
    replica = rig()
    replica.add("goes on", [1, 2, 3], max_tokens=20, temperature=0.0, stream=True)
    replica.add("ends", [1, 2, 3], max_tokens=20, temperature=0.0, stop_token_ids=[stop], stream=True)
    replica.run()
    assert replica.results["goes on", 0].tokens == plain.results["a", 0].tokens
    assert replica.results["ends", 0].tokens == plain.results["a", 0].tokens[: first + 1]
    assert replica.results["ends", 0].last.stop_reason == stop


def test_lines_tell_streams_what_chunks_would(rig: Callable[..., Any]) -> None:
    replica = rig()
    for number in range(4):
        replica.add(str(number), [1 + number, 2], max_tokens=9, seed=number, stream=number != 2)
    replica.step()
    replica.step()
    batch = replica.schedule()
    replica.scheduler.apply(replica.engine.forward(batch))
    (line,) = replica.scheduler.take_outputs()[b"api"]
    assert [sequence.request.request_id for sequence in line.sequences] == ["0", "1", "3"]
    whole = rig()
    for number in range(4):
        whole.add(str(number), [1 + number, 2], max_tokens=9, seed=number)
    whole.run()
    expected = [whole.results[name, 0] for name in ("0", "1", "3")]
    assert line.tokens.tolist() == [result.tokens[2] for result in expected]
    assert line.logprobs.tolist() == [result.logprobs[2] for result in expected]


def _calls_of_a_step(replica: Any) -> int:
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    batch_of, engine = replica.schedule, replica.engine
    sys.setprofile(count)
    try:
        batch = batch_of()
    finally:
        sys.setprofile(None)
    logits = engine.forward(batch)
    sys.setprofile(count)
    try:
        replica.scheduler.apply(logits)
        lines = replica.scheduler.take_outputs()
    finally:
        sys.setprofile(None)
    assert sum(len(line.sequences) for line in lines[b"api"]) == len(replica.sent)
    return counted


def test_a_step_of_many_calls_no_more_functions_than_one_of_few(rig: Callable[..., Any]) -> None:
    counted = []
    for many in (8, 64):
        replica = rig(max_batch=64, max_tokens=256, num_blocks=256, block_size=16)
        for number in range(many):
            replica.add(str(number), [1, 2, 3], max_tokens=12, seed=number, stream=True)
        for _ in range(4):
            replica.step()
        counted.append(_calls_of_a_step(replica))
    assert counted[0] == counted[1]


@pytest.mark.parametrize("lengths", [(2, 3, 4), (3, 2, 2), (4, 4, 4), (1, 4, 3)], ids=str)
def test_who_is_first_never_gives_way_to_those_in_arrays(rig: Callable[..., Any], lengths: tuple[int, ...]) -> None:
    replica = rig(num_blocks=9, max_model_len=36, prefix_caching=False)
    for number, length in enumerate(lengths):
        replica.add(
            str(number), [1] * length, max_tokens=24, seed=number, repetition_penalty=1.1 if not number else 1.0
        )
    while not replica.scheduler.idle:
        replica.step()
        assert all(s.request.request_id != "0" for s in replica.scheduler._batcher.waiting)
    assert replica.scheduler.counters["preempted"]


def test_nobody_joins_whom_the_next_step_sends_away(rig: Callable[..., Any]) -> None:
    replica = rig(max_batch=2)
    replica.add("a", [1, 2, 3], n=5, max_tokens=9, seed=1)
    for _ in range(4):
        replica.step()
        assert not len(replica.scheduler._cohort)
    replica.run()


def test_sequences_that_fill_their_blocks_in_one_step_offer_them_in_turns(
    rig: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every sixteenth step of those that began together would last half as long again."""
    replica = rig(device=True, block_size=4, max_batch=8, num_blocks=256)
    for number in range(8):
        replica.add(str(number), [1 + number, 2, 3], max_tokens=40, seed=number, ignore_eos=True)
    for _ in range(6):
        replica.step()
    brought: list[int] = []
    bring_up = Cohort._bring_up

    def counted(cohort: Cohort, row: int) -> None:
        brought[-1] += int(cohort._rows["since"][row]) != cohort._steps
        bring_up(cohort, row)

    monkeypatch.setattr(Cohort, "_bring_up", counted)
    for _ in range(24):
        brought.append(0)
        replica.step()
    assert max(brought) == 2
    assert sum(brought) >= 40, "each of its blocks in time"


def test_whoever_comes_finds_every_full_block_in_the_cache(rig: Callable[..., Any]) -> None:
    replica = rig(block_size=4, max_batch=12, num_blocks=256)
    for number in range(8):
        replica.add(str(number), [1 + number, 2, 3], max_tokens=40, seed=number, ignore_eos=True, stream=True)
    while len(replica.results.get(("7", 0), Result()).tokens) < 10:
        replica.step()
    known = [8, 2, 3, *replica.results["7", 0].tokens]
    replica.add("like 7", [*known, 1], max_tokens=2)
    replica.step()
    replica.step()
    assert replica.results["like 7", 0].chunks[0].cached_tokens == 4 * ((len(known) - 1) // 4)
