"""Every token of a chaos run, derived again from what its spans claim: by the numpy reference, and to the bit by an
engine of one rank.

The spans alone say which version computed each position: no history is tried beside the one that they tell. A
preemption, a pause or a clear that had positions computed again without a word makes a token that cannot be derived.
"""

import functools
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np

from rollout_client.spans import forward_passes
from tests.chaos.clients import Sample
from tests.chaos.service import SUM_PARTS
from tests.chaos.trainer import weights_of
from tests.reference.checkpoint import CONFIG, Checkpoint
from tests.reference.exact import ExactReplay, difference
from tests.reference.llama import Replay

TOLERANCE = 1e-3
CLOSE = 1e-4
CHUNK = 50


class Verdict:
    """tokens: replayed. torn: what could not be derived, in words. telling, asked: tokens that another version cannot
    have made, of those for which that was tried."""

    def __init__(self) -> None:
        self.tokens = self.telling = self.asked = 0
        self.torn: list[str] = []

    def add(self, other: "Verdict") -> None:
        """Both together."""
        self.tokens += other.tokens
        self.telling += other.telling
        self.asked += other.asked
        self.torn += other.torn


def judge(seed: int, samples: Sequence[Sample], workers: int) -> Verdict:
    """All samples, over several processes."""
    verdict = Verdict()
    chunks = [samples[at : at + CHUNK] for at in range(0, len(samples), CHUNK)]
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")  # of the children: matrices are small
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for part in pool.map(functools.partial(_judge_some, seed), chunks):
            verdict.add(part)
    return verdict


def _judge_some(seed: int, samples: Sequence[Sample]) -> Verdict:
    verdict = Verdict()
    exact = exact_replay(seed)
    for number, sample in enumerate(samples):
        problem = replay(seed, sample) or differing_bits(exact, sample)
        verdict.tokens += len(sample.tokens)
        if problem:
            verdict.torn.append(f"{problem}; prompt of {len(sample.prompt)}, spans {sample.spans}, {sample.finish}")
        elif number == 0:  # is the question hard enough?
            likely = rows_of(seed, sample, shift=1)
            own = likely[np.arange(len(sample.tokens)), sample.tokens]
            verdict.telling += int((np.abs(own - sample.logprobs) > 10 * TOLERANCE).sum())
            verdict.asked += len(sample.tokens)
    return verdict


def replay(seed: int, sample: Sample) -> str:
    """What is wrong with it; "" = every token is derived."""
    count = len(sample.tokens)
    if len(sample.logprobs) != count:
        return f"{count} tokens with {len(sample.logprobs)} logprobs"
    spans = sample.spans
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != count:
        return "spans do not cover the tokens"
    if any(after.version < before.version for before, after in pairwise(spans)):
        return "versions go back"
    if any(after.version == before.version and not after.recomputed for before, after in pairwise(spans)):
        return "a span begins for nothing"
    for at, row in enumerate(rows_of(seed, sample)):
        token, said = sample.tokens[at], sample.logprobs[at]
        if not _fits(row, token, said, sample.greedy):
            version = next(span.version for span in spans if at < span.end)
            return f"token {at} of {count} is not version {version}'s: its logprob is {abs(row[token] - said):.4f} off"
    return ""


def exact_replay(seed: int) -> ExactReplay:
    """What computes as the services of a run with this seed do."""
    with tempfile.TemporaryDirectory(prefix="witness-") as scratch:
        Checkpoint.random(Path(scratch) / "model", seed)
        return ExactReplay(Path(scratch) / "model", functools.partial(weights_of, seed), sum_parts=SUM_PARTS)


def differing_bits(exact: ExactReplay, sample: Sample) -> str:
    """What is wrong with it, its spans being in order; "" = every logprob is derived to the last bit."""
    passes = forward_passes(sample.spans, len(sample.prompt))
    temperature = 0.0 if sample.greedy else 1.0
    return difference(sample.logprobs, exact.logprobs(sample.prompt, sample.tokens, passes, temperature))


def rows_of(seed: int, sample: Sample, shift: int = 0) -> np.ndarray:
    """[tokens, vocab] log-probabilities, as the spans claim; shift: as if made by that many versions later."""
    versions = sorted({span.version for span in sample.spans})
    model = Replay(CONFIG, [_weights(seed, version + shift) for version in versions])
    ids, first = np.array(sample.prompt + sample.tokens), len(sample.prompt) - 1
    rows = []
    for one in forward_passes(sample.spans, len(sample.prompt)):
        owner = np.searchsorted(versions, one.versions)
        rows.append(model.logprobs(ids[: len(owner)], owner)[first + one.start :])
    return np.concatenate(rows)


def _fits(row: np.ndarray, token: int, said: float, greedy: bool) -> bool:
    if greedy and row.max() - row[token] > CLOSE:
        return False
    return abs(float(row[token]) - said) < TOLERANCE


@functools.lru_cache(maxsize=64)
def _weights(seed: int, version: int) -> dict[str, np.ndarray]:
    return weights_of(seed, version)
