"""Tokens drawn on the device are those the host draws from the same logits and numbers."""

import numpy as np
import pytest

from worker.engine.base import Cuts
from worker.gpu.compiler import compiled, source
from worker.gpu.drawing import Drawing
from worker.gpu.driver import CudaError, Driver, Module
from worker.logit_edits import LogitEdits
from worker.messages import SamplingParams
from worker.row_sampler import RowSampler
from worker.sampler import Pick, Sampler

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
    return Cuts(np.zeros(count, np.int32), np.ones(count), np.zeros(count, np.float32), np.zeros(count, np.int32))


def _no_step(batch, sources):
    raise AssertionError("nothing follows here")


@pytest.fixture(scope="module")
def driver():
    try:
        return Driver()
    except CudaError as error:
        pytest.skip(str(error))


def drawing_from(driver, logits):
    """Over logits [L, vocab] that lie on the device."""
    stream = driver.stream()
    address = driver.allocate(logits.nbytes, "test")
    driver.to_device(address, logits, stream)
    driver.wait(stream)
    module = Module(driver, compiled(source(), MACROS, driver.capability))
    rows, vocab = logits.shape
    return Drawing(driver, module, stream, address, vocab, rows, _no_step)


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
            logprobs=int(rng.choice([0, 1, 5, 20, 64])),
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
