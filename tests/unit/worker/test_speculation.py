"""Speculative decoding: the distribution is the model's, and nothing else about a response changes."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.fake_engine import fake_logits
from worker.logit_edits import LogitEdits
from worker.messages import SamplingParams
from worker.sampler import Pick, Sampler
from worker.speculation import Proposal, judged

MakeRig = Callable[..., Any]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
VOCAB = 12
DRAWS = 6_000
_Z = 4.5
"""Standard deviations: a right implementation fails a check of this kind once in a hundred thousand."""


def picks(sampling: SamplingParams, count: int) -> list[Pick]:
    return [Pick(0, sampling, LogitEdits(sampling, [1], frozenset()), 5, sample, 3) for sample in range(count)]


def assert_follows(tokens: list[int], shares: np.ndarray) -> None:
    """Counts of tokens lie where draws from `shares` would put them."""
    count, found = len(tokens), Counter(tokens)
    assert not [token for token in found if shares[token] == 0]
    for token, share in enumerate(shares):
        spread = max(1.0, np.sqrt(count * share * (1 - share)))
        assert abs(found[token] - count * share) < _Z * spread, f"token {token}: {found[token]} of {count * share:.0f}"


@pytest.mark.parametrize("apart", [0.0, 1.0, 4.0])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6, top_p=0.8),
        SamplingParams(top_k=4),
        SamplingParams(min_p=0.1, logit_bias={2: 3.0}),
    ],
    ids=["plain", "top-p", "top-k", "min-p and bias"],
)
def test_what_is_kept_or_replaced_follows_the_model(sampling: SamplingParams, apart: float) -> None:
    rng = np.random.default_rng(3)
    model = rng.standard_normal((1, VOCAB), dtype=np.float32) * 2
    draft = model + np.float32(apart) * rng.standard_normal((1, VOCAB), dtype=np.float32)
    sampler, wanted = Sampler(VOCAB), picks(sampling, DRAWS)
    proposals = sampler.propose(draft, wanted)
    found = sampler.verify(model, wanted, proposals)
    plain = sampler.sample(model, wanted)
    spread = sampler._spread(model[0], wanted[0])
    shares = sampler._shares(spread)
    assert_follows([draw.token for draw, _ in found], shares)
    assert all(draw.token == p.token for (draw, kept), p in zip(found, proposals, strict=True) if kept)
    overlap = np.minimum(shares, sampler._shares(sampler._spread(draft[0], wanted[0]))).sum()
    kept_share = np.mean([kept for _, kept in found])
    assert abs(kept_share - overlap) < _Z / np.sqrt(DRAWS), "a draft is kept as often as it can be"
    by_token = {draw.token: draw.logprob for draw in plain}
    for draw, _ in found[:200]:
        assert draw.logprob == pytest.approx(by_token[draw.token], abs=1e-6)


def test_two_tokens_in_a_row_follow_the_model(rig: MakeRig) -> None:
    """Through scheduler and KV cache: pairs of tokens, the second judged or drawn behind a proposed one."""
    replica = rig(vocab_size=4, num_blocks=4000, max_batch=512, max_tokens=1024, speculative=True)
    count = 4096
    for i in range(count // 512):
        replica.add(str(i), PROMPT[:1], n=512, max_tokens=3, temperature=2.0, seed=i)
    replica.run()
    found = [tuple(result.tokens) for result in replica.results.values()]
    weights, expected = replica.weights(0), {}
    for a in range(4):
        for b in range(4):
            for c in range(4):
                known, share = [3], 1.0
                for token in (a, b, c):
                    row = np.exp(fake_logits(weights, known, 4).astype(np.float64) / 2.0)
                    share *= row[token] / row.sum()
                    known.append(token)
                expected[a, b, c] = share
    assert sum(expected.values()) == pytest.approx(1.0)
    names = list(expected)
    assert_follows([names.index(tokens) for tokens in found], np.array([expected[name] for name in names]))
    drafted, accepted = (replica.scheduler.counters[f"spec_{what}"] for what in ("drafted", "accepted"))
    assert drafted >= count
    assert 0.2 < accepted / drafted < 0.95


def test_greedy_tokens_are_those_without_drafts_in_fewer_steps(rig: MakeRig) -> None:
    runs = []
    for speculative in (False, True):
        replica = rig(speculative=speculative)
        replica.add("a", PROMPT, max_tokens=30, temperature=0.0, logprobs=2)
        replica.run()
        replica.check_replay("a")
        runs.append(replica)
    plain, drafted = runs
    assert plain.results["a", 0].tokens == drafted.results["a", 0].tokens
    assert plain.results["a", 0].logprobs == pytest.approx(drafted.results["a", 0].logprobs, abs=1e-5)
    assert drafted.scheduler.counters["spec_accepted"] > 5
    model_steps = [batch for batch in drafted.batches if not batch.draft]
    saved = len(plain.batches) - len(model_steps)
    assert drafted.scheduler.counters["spec_accepted"] - saved in {0, 1}, "the last token may be a proposed one"


def tokens_of(rig: MakeRig, crowd: int, **sizes: Any) -> list[list[int]]:
    replica = rig(speculative=True, **sizes)
    replica.add("a", PROMPT, n=2, max_tokens=20, seed=11, temperature=1.0)
    for i in range(crowd):
        replica.add(f"other {i}", [*PROMPT[: 2 + i % 5], i], n=2, max_tokens=20)
    replica.run()
    if sizes.get("num_blocks") == 12:
        assert replica.scheduler.counters["preempted"] > 0
    return [replica.results["a", index].tokens for index in range(2)]


@pytest.mark.parametrize(
    ("crowd", "sizes"),
    [
        (6, {}),
        (6, {"num_blocks": 12, "max_model_len": 36}),
        (4, {"max_batch": 2, "max_tokens": 4}),
        (3, {"block_size": 1}),
        (3, {"prefix_caching": False}),
    ],
)
def test_same_seed_same_tokens_whatever_else_runs(rig: MakeRig, crowd: int, sizes: dict[str, Any]) -> None:
    assert tokens_of(rig, crowd, **sizes) == tokens_of(rig, 0)


def test_streams_stop_rules_and_lengths_hold_inside_a_pair(rig: MakeRig) -> None:
    for limit in range(1, 12):
        replica = rig(speculative=True)
        replica.add("a", PROMPT, max_tokens=limit, temperature=0.0, stream=True)
        replica.run()
        assert len(replica.results["a", 0].tokens) == limit
        assert replica.results["a", 0].finish == "length"
    whole = replica.results["a", 0].tokens
    for at, stop in enumerate(whole):
        replica = rig(speculative=True)
        replica.add("a", PROMPT, max_tokens=12, temperature=0.0, stop_token_ids=[stop])
        replica.run()
        result = replica.results["a", 0]
        assert result.tokens == whole[: whole.index(stop) + 1], f"stop at {at}"
        assert (result.finish, result.last.stop_reason) == ("stop", stop)


def test_a_draft_that_is_not_a_number_costs_nothing_but_itself(rig: MakeRig) -> None:
    replica = rig(speculative=True)
    replica.engine._draft_noise = np.nan
    replica.add("a", PROMPT, max_tokens=8, temperature=0.0)
    replica.run()
    replica.check_replay("a")
    assert replica.scheduler.counters["spec_drafted"] == 0


@pytest.mark.parametrize("policy", ["keep", "recompute", "abort", "wait"])
def test_a_draft_made_by_older_weights_is_judged_by_the_new_ones(rig: MakeRig, policy: str) -> None:
    replica = rig(speculative=True, kv_weights=False)
    replica.add("a", PROMPT, n=2, max_tokens=20, temperature=0.0)
    for version in range(1, 9):
        for _ in range(2 + 2 * (policy == "recompute")):
            replica.step()
        while replica.batches[-1].draft is False:
            replica.step()
        replica.update(policy, version)
    replica.run()
    for index in range(2):
        replica.check_replay("a", index)
        assert len(replica.results["a", index].spans) > 3 or policy == "abort"


def test_certain_drafts() -> None:
    target = np.array([0.5, 0.5, 0.0])
    half = np.array([0.5])
    assert judged(target, Proposal(0, np.array([1.0, 0.0, 0.0])), 0.49, half) == (0, True)
    assert judged(target, Proposal(0, np.array([1.0, 0.0, 0.0])), 0.51, half) == (1, False)
    assert judged(target, Proposal(2, np.array([0.0, 0.0, 1.0])), 0.0, np.array([0.9])) == (1, False)
    assert judged(target, Proposal(1, target), 0.99999, half) == (1, True)


def test_steps_must_hold_a_pair_for_every_seat(rig: MakeRig) -> None:
    with pytest.raises(ValueError, match="twice max_batch"):
        rig(speculative=True, max_batch=8, max_tokens=15)
