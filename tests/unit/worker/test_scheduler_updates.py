"""What the scheduler promises about updates and steps that are thrown away, one promise a test."""

from collections.abc import Callable
from typing import Any

import pytest

from worker.messages import Span

MakeRig = Callable[..., Any]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@pytest.mark.parametrize("policy", ["keep", "recompute", "abort", "wait"])
def test_spans_name_the_version_of_each_token(rig: MakeRig, policy: str) -> None:
    replica = rig(kv_weights=False)
    replica.add("a", PROMPT, max_tokens=9, temperature=0.0)
    for _ in range(4):
        replica.step()
    replica.update(policy, 1)
    replica.run()
    result = replica.results["a", 0]
    if policy == "abort":
        assert (result.finish, result.spans, len(result.tokens)) == ("abort", [Span(0, 0, 4)], 4)
    else:
        assert result.spans == [Span(0, 0, 4), Span(1, 4, 9, policy == "recompute")]
    replica.check_replay("a")
    assert replica.scheduler.drain_samples()["staleness"] == [1.0 if policy != "abort" else 0.0]


def test_recompute_renews_all_kv(rig: MakeRig) -> None:
    replica = rig(kv_weights=True)
    replica.add("a", PROMPT, n=2, max_tokens=9, temperature=0.0)
    for _ in range(3):
        replica.step()
    replica.update("recompute", 1)
    assert replica.scheduler.blocks_used == 0
    replica.run()
    for index in range(2):
        replica.check_replay("a", index)
    assert replica.scheduler.counters["recomputed"] == 2
    assert replica.scheduler.counters["preempted"] == 0


def test_what_was_found_for_a_step_thrown_away_is_not_mixed_with_newer_weights(rig: MakeRig) -> None:
    """Sent back, it finds its own first blocks; the step that was to compute the rest is thrown away for an update."""
    replica = rig(kv_weights=True)
    replica.add("a", list(range(1, 25)), max_tokens=9, temperature=0.0)
    for _ in range(3):
        replica.step()
    (sequence,) = replica.scheduler._batcher.running
    replica.scheduler._batcher.send_back(sequence)
    assert replica.scheduler.schedule(replica.live) is not None
    replica.scheduler.discard()
    assert sequence.kv.computed > 0
    assert sequence.pending > 1
    replica.update("keep", 1)
    replica.run()
    assert replica.results["a", 0].spans == [Span(0, 0, 2), Span(1, 2, 9, recomputed=True)]
    replica.check_replay("a")


def test_kv_kept_over_an_update_is_no_prefix_for_others(rig: MakeRig) -> None:
    """ "old" has a token at the update and goes on; "new" names the same first blocks anew; "victim" matches them."""
    replica = rig(kv_weights=True, max_tokens=8)
    prompt = list(range(1, 25))
    replica.add("old", prompt, max_tokens=12, temperature=0.0)
    for _ in range(4):
        replica.step()
    replica.update("keep", 1)
    replica.run()
    assert [span.version for span in replica.results["old", 0].spans] == [0, 1]
    for name in ("new", "victim"):
        replica.add(name, prompt, max_tokens=4, temperature=0.0)
        replica.run()
        replica.check_replay(name)
    assert replica.results["new", 0].last.cached_tokens == 0
    assert replica.results["victim", 0].last.cached_tokens == 20


def test_abort_on_update_leaves_the_queue(rig: MakeRig) -> None:
    replica = rig(max_batch=1, max_tokens=16)
    replica.add("running", PROMPT, max_tokens=9)
    replica.add("queued", PROMPT, max_tokens=2)
    replica.step()
    replica.update("abort", 1)
    replica.run()
    assert replica.results["running", 0].finish == "abort"
    assert replica.results["queued", 0].spans == [Span(1, 0, 2)]


def test_a_drain_lets_nobody_new_in(rig: MakeRig) -> None:
    replica = rig(num_blocks=8, max_model_len=32, max_batch=2)
    for name in ("a", "b"):
        replica.add(name, [ord(name) % 32, *PROMPT], max_tokens=16, seed=0)
    replica.step()
    replica.step()
    replica.add("c", PROMPT, max_tokens=1)
    for _ in range(100):
        if not replica.scheduler.running:
            break
        assert replica.step(admit=False)
    assert replica.scheduler.counters["preempted"] > 0  # who was sent back still belongs to the drain
    assert (replica.scheduler.running, replica.scheduler.waiting) == (0, 1)
    assert not replica.step(admit=False)
    assert {key[0] for key in replica.results} == {"a", "b"}


def test_a_discarded_step_is_done_again(rig: MakeRig) -> None:
    replica = rig()
    replica.add("a", PROMPT, n=3, max_tokens=6, seed=1)
    while not replica.scheduler.idle:
        batch = replica.schedule()
        before = [array.tolist() for array in (batch.token_ids, batch.positions, batch.query_lens)]
        replica.engine.forward(batch)
        replica.scheduler.discard()
        replica.collect()
        again = replica.schedule()
        assert [array.tolist() for array in (again.token_ids, again.positions, again.query_lens)] == before
        replica.scheduler.apply(replica.engine.forward(again))
        replica.collect()
        replica.check_blocks()
    for index in range(3):
        replica.check_replay("a", index)
    assert replica.scheduler.counters["discarded_steps"] == 7 - 1


def test_a_step_is_applied_or_discarded_before_the_next(rig: MakeRig) -> None:
    replica = rig()
    replica.add("a", PROMPT, max_tokens=2)
    replica.schedule()
    with pytest.raises(AssertionError, match="neither applied nor discarded"):
        replica.schedule()
