"""Tokens drawn on the device, edits and reports are those of the host, from the same logits and numbers."""

import numpy as np
import pytest

from worker.engine.base import Cuts
from worker.gpu.carrying import Carrier
from worker.gpu.compiler import compiled, kernels
from worker.gpu.drawing import Drawing
from worker.gpu.driver import Module
from worker.logit_edits import LogitEdits
from worker.messages import SamplingParams
from worker.sampler import Pick, RowSampler, Sampler
from worker.scoring import Scorer, Scoring

MACROS = {
    "HEAD_DIM": 64,
    "HEADS": 1,
    "KV_HEADS": 1,
    "GROUP": 1,
    "HEADS_AT_ONCE": 1,
    "BLOCK": 16,
    "FP32": 1,
    "INTERLEAVED": 0,
}


def _all_open(count):
    return Cuts(np.zeros(count, np.int32), np.ones(count), np.zeros(count, np.float32))


def _no_step(batch, sources):
    raise AssertionError("nothing follows here")


def drawing_from(driver, logits, rows=None):
    """Over logits [L, vocab] that lie on the device. rows: as many are edited at once, and have seats."""
    stream = driver.stream()
    vocab = logits.shape[1]
    rows = rows or len(logits)
    address = driver.allocate(2 * rows * 4 * vocab, "test")
    driver.fill(address, 2 * rows * 4 * vocab, 0xFF, stream)
    driver.to_device(address, logits, stream)
    driver.wait(stream)
    module = Module(driver, compiled(kernels("follow", "base", "sampling"), MACROS, driver.capability))
    return Drawing(driver, module, stream, address, vocab, rows, _no_step, Carrier(driver))


@pytest.mark.parametrize(("vocab", "rows"), [(96, 3), (1000, 7), (49152, 64), (151936, 1), (151936, 33)])
def test_the_same_tokens_as_on_the_host(driver, vocab, rows):
    rng = np.random.default_rng(vocab + rows)
    logits = rng.standard_normal((rows, vocab), dtype=np.float32) * 3
    logits[:, vocab // 3] = logits.max(axis=1)  # equals: the lower id is first
    drawing = drawing_from(driver, logits)
    picks = rng.integers(0, rows, 500)
    inverse = rng.choice([1.0, 0.5, 2.0, 1 / 0.7], 500).astype(np.float32)
    greedy = rng.random(500) < 0.2
    numbers = rng.random(500)
    numbers[:2] = 0.0, np.nextafter(1.0, 0.0)
    found = drawing.logits(rows).begin(picks, inverse, greedy, numbers, _all_open(500)).drawn()
    expected = RowSampler(vocab).draw(logits, picks, inverse, greedy, numbers)
    assert found.finite.all()
    np.testing.assert_array_equal(found.tokens[greedy], expected.tokens[greedy])
    same = found.tokens == expected.tokens
    assert same.mean() > 0.99  # the sums are rounded differently: a number on the edge of a token may fall off it
    np.testing.assert_allclose(found.logprobs[same], expected.logprobs[same], atol=2e-5)
    np.testing.assert_array_equal(drawing.logits(rows)[:], logits)
    np.testing.assert_array_equal(drawing.logits(rows)[rows - 1], logits[-1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_said(driver, bad):
    logits = np.zeros((2, 1000), np.float32)
    logits[1, 777] = bad
    drawing = drawing_from(driver, logits)
    found = drawing.begin(
        np.array([0, 1]), np.ones(2, np.float32), np.array([False, False]), np.array([0.5, 0.5]), _all_open(2)
    ).drawn()
    assert found.finite.tolist() == [True, False]


@pytest.mark.parametrize(("vocab", "spread"), [(96, 3.0), (49152, 3.0), (151936, 3.0), (151936, 0.3)])
def test_cuts_leave_the_same_ids_open(driver, vocab, spread):
    """spread 0.3: so flat that no short list holds enough."""
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((4, vocab), dtype=np.float32) * np.float32(spread)
    logits[0] = np.round(logits[0])  # many equals
    drawing = drawing_from(driver, logits)
    picks = []
    for seed in range(160):
        sampling = SamplingParams(
            temperature=float(rng.choice([1.0, 0.7, 1.3])),
            top_k=int(rng.choice([0, 1, 5, 50, 3000])),
            top_p=float(rng.choice([1.0, 0.95, 0.5, 0.1])),
            min_p=float(rng.choice([0.0, 0.0, 0.05])),
        )
        picks.append(Pick(seed % 4, sampling, LogitEdits(sampling, [], frozenset()), seed, 0, 3))
    found = Sampler(vocab).sample(drawing.logits(4), picks)
    expected = Sampler(vocab).sample(logits, picks)
    same = [a.token == b.token for a, b in zip(found, expected, strict=True)]
    assert np.mean(same) > 0.98, [p.sampling for p, ok in zip(picks, same, strict=True) if not ok]
    for a, b in zip(found, expected, strict=True):
        if a.token == b.token:
            assert abs(a.logprob - b.logprob) < 3e-5


class Grammar:
    """Stands for a grammar's matcher, which needs a tokenizer: what it lets follow depends on the tokens before."""

    def __init__(self, vocab, seed, share):
        self.vocab, self.share, self.rng = vocab, share, np.random.default_rng(seed)
        self.record(0)

    def record(self, token):
        self.open = self.rng.random(self.vocab) < self.share
        self.open[int(self.rng.integers(self.vocab))] = True

    def bits(self):
        padded = np.zeros(-(-self.vocab // 32) * 32, np.bool_)
        padded[: self.vocab] = self.open
        return np.packbits(padded, bitorder="little").view(np.int32)

    def restrict(self, row, out, fill):
        out[:] = row
        out[~self.open] = fill
        return ""


def some_sampling(rng, vocab, **fields):
    def some(most):
        return rng.integers(0, vocab, int(rng.integers(1, most))).tolist()

    stops = some(6)
    chosen = {
        "temperature": float(rng.choice([0.0, 1.0, 0.7])),
        "repetition_penalty": float(rng.choice([1.0, 1.3, 0.8])),
        "presence_penalty": float(rng.choice([0.0, 0.5])),
        "frequency_penalty": float(rng.choice([0.0, 0.3, -0.2])),
        "logit_bias": {i: float(rng.normal() * 5) for i in some(20)} if rng.random() < 0.5 else {},
        "allowed_token_ids": some(200) if rng.random() < 0.2 else None,
        "bad_words": [some(2), some(3), [int(rng.integers(vocab)), stops[0]]] if rng.random() < 0.4 else [],
        "min_tokens": int(rng.choice([0, 0, 4])),
        "stop_token_ids": stops,
        "top_k": int(rng.choice([0, 0, 5, 50])),
        "top_p": float(rng.choice([1.0, 1.0, 0.9])),
        "min_p": float(rng.choice([0.0, 0.0, 0.05])),
    }
    return SamplingParams(**(chosen | fields))


def edits_of(rng, vocab, sampling, seed):
    grammar = Grammar(vocab, seed, 0.02) if rng.random() < 0.3 else None
    prompt = rng.integers(0, vocab, 30).tolist()
    return LogitEdits(sampling, prompt, frozenset(sampling.stop_token_ids), grammar)


@pytest.mark.parametrize("vocab", [96, 1000, 151936])
@pytest.mark.parametrize("seats", [4, 24])
def test_edited_rows_have_the_hosts_bits_while_sequences_come_and_go(driver, vocab, seats):
    """A seat for some of them, or for all; some stand still for a while, some are replaced."""
    rng = np.random.default_rng(vocab + seats)
    logits = rng.standard_normal((4, vocab), dtype=np.float32) * 5
    drawing = drawing_from(driver, logits, rows=seats)
    sequences = [edits_of(rng, vocab, some_sampling(rng, vocab), i) for i in range(12)]
    compared = 0
    for step in range(10):
        chosen = rng.permutation(12)[: min(seats, 9)].tolist()
        active = [sequences[i] for i in chosen if sequences[i].active]
        rows = rng.integers(0, 4, len(active)).tolist()
        packed, places = drawing._packing.pack(active, rows, seats)
        assert places.tolist() == list(range(seats, seats + len(active)))
        drawing._edit(packed)
        found = np.empty((len(active), vocab), np.float32)
        driver.to_host(found, drawing._logits + 4 * vocab * seats, drawing._stream)
        driver.wait(drawing._stream)
        for edits, row, edited in zip(active, rows, found, strict=True):
            expected = logits[row].copy()
            assert edits.apply(expected) == ""
            np.testing.assert_array_equal(edited, expected)
            compared += 1
        for i in chosen:
            for _ in range(int(rng.integers(0, 3))):  # some stand still, some go on elsewhere
                sequences[i].record(int(rng.integers(0, min(vocab, 40))))
        if step % 3 == 2:
            sequences[int(rng.integers(12))] = edits_of(rng, vocab, some_sampling(rng, vocab), step)
    assert compared > 30
    np.testing.assert_array_equal(drawing.logits(len(logits))[:], logits)


@pytest.mark.parametrize("mode", ["processed", "raw"])
@pytest.mark.parametrize("vocab", [96, 1000, 151936])
def test_all_that_can_be_asked_for_is_what_the_host_says(driver, vocab, mode):
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((5, vocab), dtype=np.float32) * 4
    logits[0] = np.round(logits[0])  # many equals
    drawing = drawing_from(driver, logits, rows=8)  # fewer than there are picks
    picks = []
    for seed in range(60):
        fields = {"logprobs": int(rng.choice([0, 1, 5, 64, 90]))}
        if rng.random() < 0.2:
            fields = {"logprob_token_ids": rng.integers(0, vocab, 7).tolist()}
        fields["sampling_mask"] = bool(rng.random() < 0.3)
        sampling = some_sampling(rng, vocab, **fields)
        edits = edits_of(rng, vocab, sampling, seed)
        for token in rng.integers(0, min(vocab, 50), int(rng.integers(0, 20))).tolist():
            edits.record(token)
        picks.append(Pick(seed % 5, sampling, edits, seed, 0, edits.length))
    found = Sampler(vocab, mode).sample(drawing.logits(5), picks)
    expected = Sampler(vocab, mode).sample(logits, picks)
    same = [a.token == b.token for a, b in zip(found, expected, strict=True)]
    assert sum(bool(draw.error) for draw in expected) < 20
    assert np.mean(same) > 0.96, [p.sampling for p, ok in zip(picks, same, strict=True) if not ok]
    for a, b, pick in zip(found, expected, picks, strict=True):
        assert a.error == b.error  # a grammar and allowed ids may have none in common
        if a.token == b.token:
            assert abs(a.logprob - b.logprob) < 3e-5, pick.sampling
            assert a.rank == b.rank
            assert len(set(a.mask) ^ set(b.mask)) <= 1, pick.sampling  # rounding, at the edge of a nucleus
            assert [i for i, _ in a.top] == [i for i, _ in b.top], pick.sampling
            np.testing.assert_allclose([p for _, p in a.top], [p for _, p in b.top], atol=3e-5)
    assert sum(bool(draw.mask) for draw in found) > 5


def test_nothing_left_and_broken_logits_are_told_apart(driver):
    vocab = 1000
    logits = np.zeros((3, vocab), np.float32)
    logits[1, 77], logits[2, 900] = np.nan, np.inf
    drawing = drawing_from(driver, logits)
    nothing = SamplingParams(allowed_token_ids=[5], bad_words=[[5]])
    one = SamplingParams(allowed_token_ids=[5], logprobs=3)
    cut = SamplingParams(allowed_token_ids=[5], bad_words=[[5]], top_k=3)
    picks = [
        Pick(row, sampling, LogitEdits(sampling, [], frozenset()), 1, 0, 0)
        for row in range(3)
        for sampling in (nothing, one, cut)
    ]
    found, expected = Sampler(vocab).sample(drawing.logits(3), picks), Sampler(vocab).sample(logits, picks)
    assert [(draw.error, draw.broken) for draw in found] == [(draw.error, draw.broken) for draw in expected]
    assert found[1].token == 5
    assert found[1].top == [(5, 0.0)], "no more ids are open"


@pytest.mark.parametrize("mode", ["processed", "raw"])
@pytest.mark.parametrize(("vocab", "rows"), [(96, 7), (151936, 130)])
def test_given_tokens_have_the_hosts_scores(driver, vocab, rows, mode):
    rng = np.random.default_rng(rows)
    logits = rng.standard_normal((rows, vocab), dtype=np.float32) * 4
    logits[1] = np.round(logits[1])
    targets = rng.integers(0, vocab, rows).tolist()
    targets[0] = int(logits[0].argmax())
    half = rows // 2
    asked = [
        Scoring(0, targets[:half], SamplingParams(prompt_logprobs=5, temperature=0.7), None),
        Scoring(half, targets[half:], SamplingParams(prompt_logprobs=0), None),
    ]
    drawing = drawing_from(driver, logits)
    found = Scorer(vocab, mode).score_all(drawing.logits(rows), asked)
    expected = Scorer(vocab, mode).score_all(logits, asked)
    for mine, hosts in zip(found, expected, strict=True):
        for a, b in zip(mine, hosts, strict=True):
            assert [(i, rank) for i, _, rank in a] == [(i, rank) for i, _, rank in b]
            np.testing.assert_allclose([p for _, p, _ in a], [p for _, p, _ in b], atol=3e-5)
    logits[2, 3] = np.nan
    broken = Scorer(vocab, mode).score_all(drawing_from(driver, logits).logits(rows), asked)
    assert broken[0].broken
    assert len(broken[1]) == rows - half


def test_more_picks_and_reports_than_are_drawn_at_once(driver):
    """300 of 1,000 ids beside each token, from rows that few can be edited of at once."""
    vocab = 1000
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((2, vocab), dtype=np.float32)
    drawing = drawing_from(driver, logits, rows=100)
    sampling = SamplingParams(logprobs=300, presence_penalty=1.0)
    picks = []
    for seed in range(1000):
        edits = LogitEdits(sampling, [], frozenset())
        edits.record(seed)
        picks.append(Pick(seed % 2, sampling, edits, seed, 0, 1))
    found, expected = Sampler(vocab).sample(drawing.logits(2), picks), Sampler(vocab).sample(logits, picks)
    assert np.mean([a.token == b.token for a, b in zip(found, expected, strict=True)]) > 0.98
    assert all([i for i, _ in a.top] == [i for i, _ in b.top] for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("vocab", [96, 1000, 151936])
def test_the_likeliest_ids_and_ranks_are_the_hosts(driver, vocab):
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((3, vocab), dtype=np.float32) * 3
    logits[0] = np.round(logits[0])  # many equals
    drawing = drawing_from(driver, logits)
    picks = []
    for seed in range(60):
        sampling = SamplingParams(
            temperature=float(rng.choice([0.0, 1.0, 0.7])),
            logprobs=int(rng.choice([0, 1, 5, 20, 64, 96, 1000])),
            top_p=float(rng.choice([1.0, 0.9])),
        )
        picks.append(Pick(seed % 3, sampling, LogitEdits(sampling, [], frozenset()), seed, 0, 3))
    found = Sampler(vocab).sample(drawing.logits(3), picks)
    expected = Sampler(vocab).sample(logits, picks)
    for a, b, pick in zip(found, expected, picks, strict=True):
        assert [i for i, _ in a.top] == [i for i, _ in b.top], pick.sampling
        np.testing.assert_allclose([p for _, p in a.top], [p for _, p in b.top], atol=3e-5)
        if a.token == b.token:
            assert a.rank == b.rank
