"""Every token of a chaos run, derived again from the version its span names, by the numpy reference.

Keys and values of earlier positions may be those of the versions that sampled them (an update kept the cache), or
may have been computed again at some point under the version of that point (a pause, a clear, a preemption). So each
token is compared with every history that is possible: all positions up to the end of span s computed under span s's
version, s rising along the sequence. The forward pass of a token's own position is always that of its own version.
"""

import functools
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from tests.chaos.clients import Sample
from tests.chaos.trainer import weights_of
from tests.reference.checkpoint import CONFIG
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
    for number, sample in enumerate(samples):
        problem = replay(seed, sample)
        verdict.tokens += len(sample.tokens)
        if problem:
            verdict.torn.append(f"{problem}; prompt of {len(sample.prompt)}, spans {sample.spans}, {sample.finish}")
        elif number == 0:  # is the question hard enough?
            likely = rows_of(seed, sample, 0, shift=1)
            own = likely[np.arange(len(sample.tokens)), sample.tokens]
            verdict.telling += int((np.abs(own - sample.logprobs) > 10 * TOLERANCE).sum())
            verdict.asked += len(sample.tokens)
    return verdict


def replay(seed: int, sample: Sample) -> str:
    """What is wrong with it; "" = every token is derived."""
    count = len(sample.tokens)
    if len(sample.logprobs) != count:
        return f"{count} tokens with {len(sample.logprobs)} logprobs"
    ends = [0, *(end for _, _, end in sample.spans)]
    starts = [start for _, start, _ in sample.spans]
    if starts != ends[:-1] or ends[-1] != count:
        return "spans do not cover the tokens"
    versions = [version for version, _, _ in sample.spans]
    if versions != sorted(set(versions)):
        return "versions go back"
    span_of = np.concatenate([np.full(end - start, at) for at, (_, start, end) in enumerate(sample.spans)])
    rows = functools.cache(lambda history: rows_of(seed, sample, history))
    history = 0
    for at, (token, said) in enumerate(zip(sample.tokens, sample.logprobs, strict=True)):
        possible = range(history, span_of[at] + 1)
        fitting = next((s for s in possible if _fits(rows(s)[at], token, said, sample.greedy)), None)
        if fitting is None:
            off = min(abs(float(rows(s)[at][token]) - said) for s in possible)
            return f"token {at} of {count} is not version {versions[span_of[at]]}'s: its logprob is {off:.4f} off"
        history = fitting
    return ""


def rows_of(seed: int, sample: Sample, history: int, shift: int = 0) -> np.ndarray:
    """[tokens, vocab] log-probabilities in a history; shift: as if made by that many versions later."""
    sets = [_weights(seed, version + shift) for version, _, _ in sample.spans]
    made_by = np.concatenate([np.full(end - start, at) for at, (_, start, end) in enumerate(sample.spans)])
    ids = np.array(sample.prompt + sample.tokens)[:-1]
    own = np.concatenate([np.full(len(sample.prompt) - 1, made_by[0]), made_by])
    return Replay(CONFIG, sets).logprobs(ids, np.maximum(own, history))[len(sample.prompt) - 1 :]


def _fits(row: np.ndarray, token: int, said: float, greedy: bool) -> bool:
    if greedy and row.max() - row[token] > CLOSE:
        return False
    return abs(float(row[token]) - said) < TOLERANCE


@functools.lru_cache(maxsize=64)
def _weights(seed: int, version: int) -> dict[str, np.ndarray]:
    return weights_of(seed, version)
