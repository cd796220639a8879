"""Every token of a chaos run, derived again from what its spans claim: by the numpy reference, and to the bit by an
engine of one rank.

The spans alone say which version computed each position: no history is tried beside the one that they tell. A
preemption, a pause or a clear that had positions computed again without a word makes a token that cannot be derived.
"""

import functools
import multiprocessing
import os
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np

from rollout_client.spans import ForwardPass, forward_passes
from tests.chaos.clients import PATTERNS, Sample
from tests.chaos.service import SUM_PARTS
from tests.chaos.text import text_of
from tests.chaos.trainer import adapted_weights, adapter_of, weights_of
from tests.reference.checkpoint import CONFIG, Checkpoint
from tests.reference.exact import ExactReplay, Sets, difference
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


def judge(seed: int, samples: Sequence[Sample], workers: int, tp: int = 1) -> Verdict:
    """All samples, over several processes. tp: ranks of a replica."""
    verdict = Verdict()
    chunks = [samples[at : at + CHUNK] for at in range(0, len(samples), CHUNK)]
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")  # of the children: matrices are small
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for part in pool.map(functools.partial(_judge_some, seed, tp), chunks):
            verdict.add(part)
    return verdict


def _judge_some(seed: int, tp: int, samples: Sequence[Sample]) -> Verdict:
    verdict = Verdict()
    asked = next((sample for sample in samples if not sample.pattern), None)  # where one id is open, all agree on it
    for sample in samples:
        problem = replay(seed, sample)
        if not problem and not sample.pattern:
            problem = differing_bits(exact_replay(seed, tp if sample.adapter else 1), sample)
        verdict.tokens += len(sample.tokens)
        if problem:
            verdict.torn.append(f"{problem}; prompt of {len(sample.prompt)}, spans {sample.spans}, {sample.finish}")
        elif sample is asked:  # is the question hard enough?
            likely = open_only(sample, rows_of(seed, sample, shift=1))
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
    if any((span.adapter_version is None) == bool(sample.adapter) for span in spans):
        return f"a span of adapter {sample.adapter!r} has another's version"
    made_by = [(span.version, span.adapter_version or 0) for span in spans]
    if any(new < old for before, after in pairwise(made_by) for old, new in zip(before, after, strict=True)):
        return "versions go back"
    if any(made_by[i - 1] == made_by[i] and not spans[i].recomputed for i in range(1, len(spans))):
        return "a span begins for nothing"
    if problem := strays(sample):
        return problem
    for at, row in enumerate(open_only(sample, rows_of(seed, sample))):
        token, said = sample.tokens[at], sample.logprobs[at]
        if not _fits(row, token, said, sample.greedy):
            span = next(span for span in spans if at < span.end)
            whose = f" with {sample.adapter} {span.adapter_version}" if sample.adapter else ""
            off = f"its logprob is {abs(row[token] - said):.4f} off"
            return f"token {at} of {count} is not version {span.version}'s{whose}: {off}"
    return ""


def strays(sample: Sample) -> str:
    """How its text leaves the pattern that it was held to; "" = it does not, as far as it goes."""
    if not sample.pattern:
        return ""
    if len(sample.masks) != len(sample.tokens):
        return f"{len(sample.tokens)} tokens with {len(sample.masks)} masks"
    if any(mask and token not in mask for token, mask in zip(sample.tokens, sample.masks, strict=True)):
        return "a token was not open"
    text = text_of(sample.tokens)
    if not re.fullmatch(sample.pattern if sample.finish == "stop" else PATTERNS[sample.pattern], text):
        return f"{text!r} does not follow {sample.pattern} ({sample.finish})"
    return ""


def open_only(sample: Sample, rows: np.ndarray) -> np.ndarray:
    """Log-probabilities among the ids that were open at each token."""
    if not sample.pattern:
        return rows
    found = np.full_like(rows, -np.inf)
    for at, mask in enumerate(sample.masks):
        ids = mask or range(rows.shape[1])
        found[at, ids] = rows[at, ids] - np.logaddexp.reduce(rows[at, ids])
    return found


@functools.lru_cache(maxsize=2)
def exact_replay(seed: int, tp: int = 1) -> ExactReplay:
    """What computes as the services of a run with this seed do. The base's tokens are the same on any number of ranks,
    those of adapters on `tp` of them."""
    with tempfile.TemporaryDirectory(prefix="witness-") as scratch:
        Checkpoint.random(Path(scratch) / "model", seed)
        sets = Sets(functools.partial(weights_of, seed), functools.partial(adapter_of, seed), sum_parts=SUM_PARTS)
        made = ExactReplay(Path(scratch) / "model", sets, tp)
        made.logprobs([1], [1], [ForwardPass(0, 1, [0], [])], 1.0)  # a second rank has read its files then
        return made


def differing_bits(exact: ExactReplay, sample: Sample) -> str:
    """What is wrong with it, its spans being in order; "" = every logprob is derived to the last bit."""
    passes = forward_passes(sample.spans, len(sample.prompt))
    temperature = 0.0 if sample.greedy else 1.0
    return difference(
        sample.logprobs, exact.logprobs(sample.prompt, sample.tokens, passes, temperature, sample.adapter)
    )


def rows_of(seed: int, sample: Sample, shift: int = 0) -> np.ndarray:
    """[tokens, vocab] log-probabilities, as the spans claim; shift: as if made by that many versions later, of
    the adapter where there is one."""
    sets = list(dict.fromkeys((span.version, span.adapter_version) for span in sample.spans))
    model = Replay(CONFIG, [_weights(seed, version, sample.adapter, adapter, shift) for version, adapter in sets])
    ids, first = np.array(sample.prompt + sample.tokens), len(sample.prompt) - 1
    rows = []
    for one in forward_passes(sample.spans, len(sample.prompt)):
        adapters = one.adapter_versions or [None] * len(one.versions)
        owner = np.array([sets.index(both) for both in zip(one.versions, adapters, strict=True)])
        rows.append(model.logprobs(ids[: len(owner)], owner)[first + one.start :])
    return np.concatenate(rows)


def _fits(row: np.ndarray, token: int, said: float, greedy: bool) -> bool:
    if greedy and row.max() - row[token] > CLOSE:
        return False
    return abs(float(row[token]) - said) < TOLERANCE


@functools.lru_cache(maxsize=256)
def _weights(seed: int, version: int, adapter: str, adapter_version: int | None, shift: int) -> dict[str, np.ndarray]:
    """shift: of the adapter's version, or of the model's where there is none."""
    if adapter_version is None:
        return weights_of(seed, version + shift)
    return adapted_weights(seed, version, adapter, adapter_version + shift)
