"""A reply says which weights computed what its tokens were sampled from, whatever made a sequence begin anew."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.worker.conftest import digest_of
from worker.messages import Span

MakeRig = Callable[..., Any]
PROMPT = list(range(1, 9))


def running(rig: MakeRig, steps: int = 3, *, prompt: list[int] = PROMPT, **options: Any) -> Any:
    """A replica whose request "a" has as many tokens as there were steps, or more with drafts."""
    replica = rig(kv_weights=True, **options)
    replica.add("a", prompt, max_tokens=12, temperature=0.0)
    for _ in range(steps):
        replica.step()
    return replica


def ended(replica: Any) -> list[Span]:
    """Run to the end; every token follows from the spans."""
    replica.run()
    replica.check_replay("a")
    spans: list[Span] = replica.results["a", 0].spans
    return spans


def preempt(replica: Any) -> None:
    """A request that goes first takes the seat."""
    before = replica.scheduler.counters.get("preempted", 0)
    replica.add(f"urgent {before}", [30, 29], max_tokens=1, priority=-1)
    replica.step()
    assert replica.scheduler.counters["preempted"] == before + 1


LOSSES = {
    "preempted": preempt,
    "paused with mode recompute, or cleared": lambda replica: replica.scheduler.clear_cache(keep_running=False),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_span_begins_where_everything_was_computed_again(rig: MakeRig, loss: str) -> None:
    replica = running(rig, max_batch=1)
    replica.update("keep", 1)
    for _ in range(2):
        replica.step()
    LOSSES[loss](replica)
    assert ended(replica) == [Span(0, 0, 3), Span(1, 3, 5), Span(1, 5, 12, recomputed=True)]


@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_is_said_where_the_same_weights_computed_it_before(rig: MakeRig, loss: str) -> None:
    replica = running(rig, max_batch=1)
    LOSSES[loss](replica)
    for _ in range(3):
        replica.step()
    LOSSES[loss](replica)
    assert ended(replica) == [Span(0, 0, 12)]


@pytest.mark.parametrize("loss", LOSSES)
def test_after_a_recomputation_the_mix_begins_anew(rig: MakeRig, loss: str) -> None:
    replica = running(rig, max_batch=1)
    replica.update("recompute", 1)
    replica.step()
    LOSSES[loss](replica)  # version 1 has computed all of it: nothing to say
    for _ in range(2):
        replica.step()
    replica.update("keep", 2)
    for _ in range(2):
        replica.step()
    LOSSES[loss](replica)
    spans = ended(replica)
    assert [(span.version, span.recomputed) for span in spans] == [(0, False), (1, True), (2, False), (2, True)]


def test_weights_under_a_number_that_comes_again_begin_a_span(rig: MakeRig) -> None:
    """Forced, or of another run."""
    replica = running(rig)
    replica.update("keep", 0)
    for _ in range(2):
        replica.step()
    replica.update("recompute", 0)
    assert ended(replica) == [Span(0, 0, 3), Span(0, 3, 5), Span(0, 5, 12, recomputed=True)]


@pytest.mark.parametrize("policy", ["keep", "recompute", "wait", "abort"])
def test_a_number_that_is_gone_back_from_and_pushed_again_is_told_apart(rig: MakeRig, policy: str) -> None:
    """7, back to 6, another 7; of the model, and then of an adapter. What each span names made its tokens."""
    replica = rig(kv_weights=True)
    seen: set[tuple[str, str]] = set()
    replica.bind(6)
    replica.adapter("p", 6)
    for turn, change in enumerate(
        (
            lambda: replica.update(policy, 7, content=70),
            lambda: replica.update(policy, 6),
            lambda: replica.update(policy, 7, content=71),
            lambda: replica.adapter("p", 7, policy, content=80),
            lambda: replica.adapter("p", 6, policy),
            lambda: replica.adapter("p", 7, policy, content=81),
        )
    ):
        ids = [f"{turn} {name}" for name in ("", "p")]
        for request_id in ids:
            replica.add(request_id, PROMPT, adapter=request_id.split(" ")[1], max_tokens=6, temperature=0.0)
        for _ in range(3):
            replica.step()
        change()
        replica.run()
        for request_id in ids:
            replica.check_replay(request_id)
            seen |= {(span.digest, span.adapter_digest) for span in replica.results[request_id, 0].claims}
    replica.add("last", PROMPT, adapter="p", max_tokens=6, temperature=0.0)
    replica.run()
    replica.check_replay("last")
    (last,) = replica.results["last", 0].claims
    assert (last.version, last.adapter_version) == (7, 7)
    assert (last.digest, last.adapter_digest) == (digest_of(71), digest_of(81))
    assert {digest for digest, _ in seen} == {digest_of(content) for content in (6, 70, 71)}
    assert {digest for _, digest in seen} >= {"", *(digest_of(content) for content in (6, 80))}


def test_each_sample_of_a_prompt_tells_its_own_story(rig: MakeRig) -> None:
    replica = rig(kv_weights=True, num_blocks=9, max_model_len=36)
    replica.add("a", PROMPT, n=3, max_tokens=12, temperature=1.0, seed=3)
    for _ in range(3):
        replica.step()
    replica.update("keep", 1)
    replica.run()
    assert replica.scheduler.counters["preempted"] > 0
    told = set()
    for index in range(3):
        replica.check_replay("a", index)
        told.add(tuple(span.recomputed for span in replica.results["a", index].spans))
    assert (False, False) in told
    assert len(told) > 1


# An update comes when a sequence that is computed again has everything but its last token, and none of the weights that
# did so has made a token. They leave no trace in its spans, so nothing of them may be left in its cache.


def leaves_no_trace_of_what_was_computed_before_its_last_token(replica: Any) -> None:
    replica.update("recompute", 1)
    (sequence,) = replica.scheduler._batcher.waiting
    while sequence.pending > 1:
        replica.step()
    replica.update("keep", 2)
    assert [span.version for span in ended(replica)] == [0, 2]


def test_a_chunk_that_ends_before_the_last_token(rig: MakeRig) -> None:
    replica = running(rig, prompt=[*PROMPT, 9], max_tokens=5, max_batch=1)  # 9 + 2 tokens by chunks of 5 leave 1
    leaves_no_trace_of_what_was_computed_before_its_last_token(replica)


def test_all_but_the_last_token_was_in_the_cache_and_the_step_is_thrown_away(rig: MakeRig) -> None:
    replica = running(rig, 5)  # 8 + 5 tokens are three blocks of 4 and one more
    (sequence,) = replica.scheduler._batcher.running
    replica.scheduler._batcher.send_back(sequence)
    assert replica.schedule() is not None
    replica.scheduler.discard()
    assert sequence.pending == 1
    replica.update("keep", 1)
    assert ended(replica) == [Span(0, 0, 5), Span(1, 5, 12, recomputed=True)]


def test_a_draft_comes_between_what_was_computed_again_and_the_next_token(rig: MakeRig) -> None:
    leaves_no_trace_of_what_was_computed_before_its_last_token(running(rig, speculative=True))


def test_logprobs_of_a_prompt_are_of_the_weights_that_make_the_first_token(rig: MakeRig) -> None:
    """An update comes when all but the prompt's last token has been computed, and so its last logprob."""
    replica = rig(kv_weights=True, max_tokens=8)
    replica.add("a", [*PROMPT, 9], max_tokens=3, temperature=0.0, prompt_logprobs=1)
    replica.step()
    (sequence,) = replica.scheduler._batcher.running
    assert (sequence.pending, sequence.request.scoring) == (1, False)
    replica.update("keep", 1)
    assert ended(replica) == [Span(1, 0, 3)]
    assert len(replica.results["a", 0].last.prompt_logprobs) == len(PROMPT)
