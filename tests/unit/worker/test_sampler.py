"""The sampler against a straightforward float64 one, and against the distribution it claims."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engine.base import Float32
from worker.logit_edits import LogitEdits
from worker.messages import SamplingParams
from worker.random_streams import uniforms
from worker.sampler import Draw, Pick, Sampler
from worker.scoring import Scorer
from worker.softmax import open_ids, truncates

VOCAB = 1000


def _logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Float32:
    return np.random.default_rng(seed).standard_normal((rows, vocab), dtype=np.float32) * 3


def _pick(row: int, *, seed: int = 1, sample: int = 0, output: tuple[int, ...] = (), **fields: Any) -> Pick:
    sampling = SamplingParams(**fields)
    edits = LogitEdits(sampling, [1, 2, 3], frozenset([5]))
    for token in output:
        edits.record(token)
    return Pick(row, sampling, edits, seed, sample, len(output))


def _processed(row: Float32, pick: Pick) -> np.ndarray[Any, np.dtype[np.float64]]:
    """log of the distribution sampled from, before any cut."""
    edited = row.copy()
    if pick.edits.active:
        pick.edits.apply(edited)
    cold = pick.sampling.temperature == 0
    scaled = edited.astype(np.float64) / (1.0 if cold else pick.sampling.temperature)
    scaled -= scaled.max()
    with np.errstate(divide="ignore"):
        return np.log(np.exp(scaled) / np.exp(scaled).sum())


def _check(row: Float32, pick: Pick, draw: Draw) -> None:
    logprobs = _processed(row, pick)
    assert not draw.error
    assert draw.logprob == pytest.approx(logprobs[draw.token], abs=1e-5)
    assert np.isfinite(draw.logprob)
    if pick.sampling.temperature == 0:
        assert draw.token == int(logprobs.argmax())
        return
    ids = np.flatnonzero(np.isfinite(logprobs))
    if truncates(pick.sampling, len(row)):
        scaled = (logprobs - logprobs.max()).astype(np.float32)
        weights = np.exp(scaled)
        ids = open_ids(scaled, weights, float(weights.sum(dtype=np.float64)), pick.sampling)
    assert draw.token in ids
    reached = np.exp(logprobs[ids]).cumsum()
    reached /= reached[-1]
    at = int(np.searchsorted(ids, draw.token))
    number = float(uniforms([pick.seed], [pick.sample], [pick.position])[0])
    assert (reached[at - 1] if at else 0.0) - 1e-5 <= number <= reached[at] + 1e-5


_fields = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.5]),
        "top_k": st.sampled_from([0, 1, 7, 100]),
        "top_p": st.sampled_from([0.2, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, -0.5]),
        "logit_bias": st.sampled_from([{}, {3: 5.0, 4: -100.0}]),
        "allowed_token_ids": st.sampled_from([None, [1, 2, 3, 900]]),
        "min_tokens": st.sampled_from([0, 4]),
        "logprobs": st.sampled_from([0, 3]),
    },
)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(_fields, st.integers(0, 5), st.integers(0, 2**64), st.lists(st.integers(0, 999), max_size=5)),
        min_size=1,
        max_size=6,
    ),
)
def test_any_mixture_of_requests_is_each_sampled_by_its_own_rules(
    requests: list[tuple[dict[str, Any], int, int, list[int]]],
) -> None:
    logits = _logits(6)
    picks = [_pick(row, seed=seed, output=tuple(out), **fields) for fields, row, seed, out in requests]
    sampler = Sampler(VOCAB)
    draws = sampler.sample(logits, picks)
    for pick, draw in zip(picks, draws, strict=True):
        _check(logits[pick.row], pick, draw)
        assert sampler.sample(logits, [pick]) == [draw]


def test_logits_stay_as_they_are() -> None:
    logits = _logits(3)
    before = logits.copy()
    logits.flags.writeable = False
    Sampler(VOCAB).sample(logits, [_pick(0), _pick(1, logit_bias={1: 9.0}), _pick(2, temperature=0.0, logprobs=2)])
    assert np.array_equal(logits, before)


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"logit_bias": {3: 1.0}}],
    ids=str,
)
def test_draws_are_distributed_as_claimed(fields: dict[str, Any]) -> None:
    """4000 positions of one stream; chi-square over the likely ids, fixed seeds, so it passes or fails for good."""
    count, vocab = 4000, 400
    logits = np.random.default_rng(3).standard_normal((1, vocab), dtype=np.float32) * 2
    base = _pick(0, seed=11, **fields)
    picks = [base._replace(position=at) for at in range(count)]
    tokens = np.array([draw.token for draw in Sampler(vocab).sample(logits, picks)])
    expected = np.exp(_processed(logits[0], base))
    if truncates(base.sampling, vocab):
        scaled = np.log(expected / expected.max()).astype(np.float32)
        weights = np.exp(scaled)
        kept = open_ids(scaled, weights, float(weights.sum(dtype=np.float64)), base.sampling)
        cut = np.zeros_like(expected)
        cut[kept] = expected[kept] / expected[kept].sum()
        expected = cut
    seen = np.bincount(tokens, minlength=vocab)
    assert not seen[expected == 0].any()
    often = expected * count >= 8
    observed = np.append(seen[often], seen[~often].sum())
    predicted = np.append(expected[often] * count, expected[~often].sum() * count)
    observed, predicted = observed[predicted > 0.5], predicted[predicted > 0.5]
    chi_square = float(((observed - predicted) ** 2 / predicted).sum())
    freedom = len(observed) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 4


def test_samples_of_one_prompt_differ_and_repeat_with_their_seed() -> None:
    logits = _logits(1)
    sampler = Sampler(VOCAB)

    def tokens(seed: int) -> list[int]:
        picks = [_pick(0, seed=seed, sample=sample, temperature=3.0) for sample in range(8)]
        return [draw.token for draw in sampler.sample(logits, picks)]

    alone = [sampler.sample(logits, [_pick(0, seed=5, sample=s, temperature=3.0)])[0].token for s in range(8)]
    assert tokens(5) == alone
    assert len(set(alone)) > 6
    assert tokens(6) != alone


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [7, 8]] = 4
    for fields in ({}, {"logprobs": 2}, {"top_k": 3}):
        draw = Sampler(VOCAB).sample(logits, [_pick(0, temperature=0.0, **fields)])[0]
        assert draw.token == 7
        assert draw.logprob == pytest.approx(4 - np.log(998 + 2 * np.exp(4)), abs=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fields", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"logprobs": 2}], ids=str)
def test_a_row_that_is_not_finite_ends_alone(bad: float, fields: dict[str, Any]) -> None:
    logits = _logits(3)
    sampler = Sampler(VOCAB)
    good = sampler.sample(logits, [_pick(row, **fields) for row in range(3)])
    logits[1, 500] = bad
    draws = sampler.sample(logits, [_pick(row, **fields) for row in range(3)])
    assert draws[1].broken
    assert "not finite" in draws[1].error
    assert [draws[0], draws[2]] == [good[0], good[2]]


def test_a_request_that_masks_everything_says_so() -> None:
    draw = Sampler(VOCAB).sample(_logits(1), [_pick(0, allowed_token_ids=[5], min_tokens=3)])[0]
    assert draw.error == "every token is masked"
    assert not draw.broken


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 2e-5, 1e-3, 1e6])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    for fields in ({}, {"logprobs": 5}, {"top_p": 0.9}):
        draw = Sampler(VOCAB).sample(_logits(1), [_pick(0, temperature=temperature, **fields)])[0]
        assert not draw.error
        assert np.isfinite([draw.logprob, *(logprob for _, logprob in draw.top)]).all()


def test_top_and_rank_are_of_the_distribution_sampled_from() -> None:
    logits = _logits(1)
    pick = _pick(0, temperature=0.5, logprobs=4, logit_bias={9: 20.0})
    draw = Sampler(VOCAB).sample(logits, [pick])[0]
    logprobs = _processed(logits[0], pick)
    best = np.argsort(-logprobs, kind="stable")[:4]
    assert [i for i, _ in draw.top] == best.tolist()
    assert [p for _, p in draw.top] == pytest.approx(logprobs[best], abs=1e-5)
    assert draw.rank == int((logprobs > logprobs[draw.token]).sum()) + 1
    assert draw.top[0][0] == 9


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.5}, {"temperature": 0.0}, {"logit_bias": {9: 20.0}}, {"top_k": 3, "logprobs": 2}],
    ids=str,
)
def test_raw_logprobs_are_of_the_untouched_logits(fields: dict[str, Any]) -> None:
    logits = _logits(1)
    pick = _pick(0, **fields)
    raw = Sampler(VOCAB, "raw").sample(logits, [pick])[0]
    untouched = _processed(logits[0], _pick(0))
    assert raw.token == Sampler(VOCAB).sample(logits, [pick])[0].token
    assert raw.logprob == pytest.approx(untouched[raw.token], abs=1e-5)
    for i, logprob in raw.top:
        assert logprob == pytest.approx(untouched[i], abs=1e-5)


def test_sampling_mask_lists_what_the_cut_left() -> None:
    logits = _logits(1)
    draw = Sampler(VOCAB).sample(logits, [_pick(0, top_k=5, sampling_mask=True)])[0]
    assert list(draw.mask) == sorted(np.argsort(-logits[0])[:5].tolist())
    assert not Sampler(VOCAB).sample(logits, [_pick(0, sampling_mask=True)])[0].mask
    greedy = Sampler(VOCAB).sample(logits, [_pick(0, sampling_mask=True, temperature=0.0)])[0]
    assert list(greedy.mask) == [greedy.token]
    assert not Sampler(VOCAB).sample(logits, [_pick(0, top_k=5)])[0].mask


def test_scores_are_what_sampling_would_have_reported() -> None:
    logits = _logits(4)
    sampler, scorer = Sampler(VOCAB), Scorer(VOCAB)
    sampling = SamplingParams(temperature=0.7, prompt_logprobs=3)
    draws = sampler.sample(logits, [_pick(row, temperature=0.7, logprobs=3) for row in range(4)])
    scores = scorer.score(logits, [draw.token for draw in draws], sampling)
    assert isinstance(scores, list)
    for draw, entries in zip(draws, scores, strict=True):
        assert entries[0] == (draw.token, pytest.approx(draw.logprob, abs=1e-6), draw.rank)
        others = [(i, rank) for rank, (i, _) in enumerate(draw.top, 1) if i != draw.token]
        assert [(i, rank) for i, _, rank in entries[1:]] == others
    assert isinstance(scorer.score(logits, [0] * 4, SamplingParams(prompt_logprobs=0)), list)
    logits[2, 0] = np.nan
    broken = scorer.score(logits, [0] * 4, sampling)
    assert isinstance(broken, Draw)
    assert broken.broken


def test_a_closed_token_has_the_score_of_one_that_cannot_be_sampled() -> None:
    sampling = SamplingParams(prompt_logprobs=0, bad_words=[[3], [4, 5]])
    edits = LogitEdits(sampling, [0], frozenset())
    scores = Scorer(VOCAB).score(_logits(4), [3, 5, 4, 5], sampling, edits)
    assert isinstance(scores, list)
    assert [entries[0][1] == -9999.0 for entries in scores] == [True, False, False, True]


@pytest.fixture
def profile() -> Callable[[int], float]:
    import time

    def measure(rows: int) -> float:
        logits = _logits(rows, vocab=49152)
        sampler = Sampler(49152)
        picks = [_pick(row, temperature=0.7) for row in range(rows)]
        times = []
        for _ in range(5):
            start = time.thread_time()
            sampler.sample(logits, picks)
            times.append(time.thread_time() - start)
        return min(times)

    return measure


def test_a_large_vocabulary_costs_little_per_row(profile: Callable[[int], float]) -> None:
    """About 0.1 ms of one core for a row of 49152; a sort or a second copy of the batch would be several times that."""
    assert profile(64) < 0.030


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 3}], ids=str)
def test_logprobs_of_chosen_ids_come_after_the_sampled_one(fields: dict[str, Any]) -> None:
    logits = _logits(1)
    plain = Sampler(VOCAB).sample(logits, [_pick(0, **fields)])[0]
    pick = _pick(0, logprob_token_ids=[9, 4, 9, 7], allowed_token_ids=[*range(5), *range(8, VOCAB)], **fields)
    draw = Sampler(VOCAB).sample(logits, [pick])[0]
    expected = _processed(logits[0], pick)
    assert [i for i, _ in draw.top] == list(dict.fromkeys([draw.token, 9, 4, 7]))
    for token_id, logprob in draw.top:
        assert logprob == pytest.approx(-9999.0 if token_id == 7 else expected[token_id], abs=1e-5)
    assert draw.rank >= 1
    assert not plain.top


def test_chosen_ids_alone_are_reported_too() -> None:
    logits = _logits(2)
    draws = Sampler(VOCAB).sample(logits, [_pick(0), _pick(1, logprob_token_ids=[3, 5])])
    assert not draws[0].top
    assert [i for i, _ in draws[1].top] == list(dict.fromkeys([draws[1].token, 3, 5]))
