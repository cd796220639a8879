"""One order of additions: compiled or in numpy, drawn or scored, a row has the same bits."""

import numpy as np
import pytest

from worker import softmax
from worker.engine.base import Cuts
from worker.logit_edits import LogitEdits
from worker.messages import SamplingParams
from worker.random_streams import uniforms
from worker.sampler import Pick, RowSampler, Sampler
from worker.scoring import Scorer
from worker.softmax import Softmax, exponentials, largest

VOCABULARIES = [1, 2, 15, 16, 17, 63, 64, 255, 256, 257, 1000, 49152]


@pytest.fixture
def by_numpy(monkeypatch):
    """Call it, and from then on there is no compiler."""

    def switch():
        monkeypatch.setattr(softmax, "load", lambda: None)

    if softmax.load() is None:
        pytest.skip("no C compiler here: there is nothing to compare with")
    return switch


def _logits(rows, vocab, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, vocab), dtype=np.float32) * 4


def _bits(softmax, row, inverse):
    found = softmax.weigh(row, inverse)
    return (
        *np.array(found, np.float64).view(np.uint64).tolist(),
        softmax.scaled.tobytes(),
        softmax.blocks.tobytes(),
        softmax.sums.tobytes(),
    )


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_compiled_and_numpy_weigh_a_row_to_the_same_bits(vocab, by_numpy):
    rows = _logits(6, vocab)
    rows[1] *= 30  # most weights are 0
    rows[2, ::2] = -np.inf  # masked
    rows[3] = 0
    inverses = [1.0, 1 / 0.7, 1 / 1.3, 1.0, 1 / 0.3, 1 / 3]
    if vocab > 2:
        rows[2, 1] = 3.0
    compiled = [_bits(Softmax(vocab), row, inverse) for row, inverse in zip(rows, inverses, strict=True)]
    by_numpy()
    with np.errstate(all="ignore"):
        assert [_bits(Softmax(vocab), row, i) for row, i in zip(rows, inverses, strict=True)] == compiled


def test_a_row_may_be_weighed_where_its_scaled_logits_go(by_numpy):
    row = _logits(1, 1000)[0]
    apart = _bits(Softmax(1000), row, 1 / 0.7)
    for switch in (lambda: None, by_numpy):
        switch()
        softmax = Softmax(1000)
        softmax.scaled[:] = row
        assert _bits(softmax, softmax.scaled, 1 / 0.7) == apart


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_compiled_and_numpy_draw_the_same(vocab, by_numpy):
    logits = _logits(20, vocab)
    rows = np.arange(20)[::-1].copy()
    inverse = np.where(rows % 3, np.float32(1 / 0.7), np.float32(1)).astype(np.float32)
    numbers = np.random.default_rng(1).random(20)
    numbers[:2] = 0.0, 1 - 2.0**-53
    greedy = rows % 5 == 2
    cuts = Cuts(
        np.array([0, 3] * 10, np.int32),
        np.array([1.0, 1.0, 0.9, 1.0] * 5),
        np.array([0.0] * 15 + [0.1] * 5, np.float32),
    )
    logits[4, -1] = np.inf
    logits[5, 0] = np.nan
    logits[6, vocab // 2] = -np.inf
    apart = np.zeros((20, vocab + 7), np.float32)
    apart[:, :vocab] = logits
    found = [RowSampler(vocab).draw(some, rows, inverse, greedy, numbers, cuts) for some in (logits, apart[:, :vocab])]
    by_numpy()
    with np.errstate(all="ignore"):
        found.append(RowSampler(vocab).draw(logits, rows, inverse, greedy, numbers, cuts))
    first, *others = [[column.tolist() for column in drawn[:3]] for drawn in found]
    assert first[2] == [row not in (4, 5, 6) for row in rows]
    for other in others:
        assert other[2] == first[2]
        for column in (0, 1):
            assert [v for v, ok in zip(other[column], first[2], strict=True) if ok] == [
                v for v, ok in zip(first[column], first[2], strict=True) if ok
            ]


def test_compiled_and_numpy_find_the_same_largest(by_numpy):
    rng = np.random.default_rng(2)
    asked = []
    for vocab in VOCABULARIES:
        plain = rng.standard_normal(vocab, dtype=np.float32)
        tied = np.round(plain)  # equal values: the lower id is first
        masked = np.where(rng.random(vocab) < 0.9, -np.inf, plain).astype(np.float32)
        asked += [(values, count) for values in (plain, tied, masked, -np.sort(-plain)) for count in (1, 5, 64, vocab)]
    compiled = [largest(values, count).tolist() for values, count in asked]
    by_numpy()
    assert [largest(values, count).tolist() for values, count in asked] == compiled


def test_compiled_and_numpy_have_the_same_random_numbers(by_numpy):
    seeds = [0, 1, 2**64 - 1, -5, 2**63, 12345678901234567890]
    asked = (seeds, [0, 1, 2, 2**32 - 1, 7, 0], [0, 5, 2**31, 2**32 - 1, 9, 1])
    compiled = [uniforms(*asked, purpose).tolist() for purpose in (0, 1, 3)]
    by_numpy()
    assert [uniforms(*asked, purpose).tolist() for purpose in (0, 1, 3)] == compiled


def test_exponentials_are_right_to_two_ulp():
    x = -np.abs(np.concatenate([_logits(1, 100_000)[0] * 5, np.linspace(0, 87, 100_001, dtype=np.float32)]))
    x = x[x >= -87]
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(exponentials(x) - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    assert not exponentials(np.array([-87.01, -1000, -np.inf], np.float32)).any()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("mode", ["processed", "raw"])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_a_tokens_logprob_is_one_number_whichever_way_it_comes(mode, temperature, compiled, by_numpy):
    """Drawn in a batch, alone, cut, with others' logprobs, with edits that change nothing, and scored."""
    if not compiled:
        by_numpy()
    logits = _logits(40, 3000)
    sampler, scorer = Sampler(3000, mode), Scorer(3000, mode)
    ways = [
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=temperature, top_k=2999),
        SamplingParams(temperature=temperature, logprobs=3),
        SamplingParams(temperature=temperature, logit_bias={0: 0.0}),
    ]
    for row in range(40):
        found: dict[int, set[float]] = {}
        picks = [Pick(row, way, LogitEdits(way, [1], frozenset()), 5, 0, row) for way in ways]
        draws = [*sampler.sample(logits, picks), *(sampler.sample(logits, [pick])[0] for pick in picks)]
        scored = scorer.score(logits[row : row + 1], [draws[0].token], ways[0])
        assert isinstance(scored, list)
        found.setdefault(draws[0].token, set()).add(scored[0][0][1])
        for draw in draws:
            found.setdefault(draw.token, set()).add(draw.logprob)
        assert all(len(values) == 1 for values in found.values()), found
        assert draws[2].rank >= 1


def test_without_a_compiler_it_is_said_once_and_all_works(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    softmax.load.cache_clear()
    try:
        with caplog.at_level("INFO"):
            sampler = Sampler(100)
            sampling = SamplingParams()
            pick = Pick(0, sampling, LogitEdits(sampling, [1], frozenset()), 1, 0, 0)
            tokens = [sampler.sample(_logits(1, 100), [pick])[0].token for _ in range(3)]
    finally:
        softmax.load.cache_clear()
    assert len([record for record in caplog.records if "drawn by numpy" in record.message]) == 1
    assert tokens == [tokens[0]] * 3
