"""No torn adapters: two trainers push two adapters under load, and every token is derived again from what its spans
claim of its own adapter. Under every policy in turn, `finish` among them; `REPLAY_PUSHES=200` makes it the long proof.

The derivation is an independent forward in numpy over weights into which the claimed version is merged: every logprob
must be theirs, and under the adapter's other version nearly all of them would be far off. Then an engine of as many
ranks makes them once more, to the last bit.
"""

import itertools
import threading
import uuid
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from rollout_client.http import Output, RolloutClient
from rollout_client.publisher import WeightPublisher
from tests.integration.live import LiveService
from tests.integration.test_replay import LENGTH, LONGEST_S, PROMPTS, PUSHES, TOLERANCE, Load, versions, wait_for
from tests.reference.adapters import adapter, adapter_config, merged
from tests.reference.checkpoint import Checkpoint, Weights, random_weights
from tests.reference.exact import ExactReplay, Sets, difference
from tests.reference.llama import Replay

NAMES = ("policy-a", "policy-b")
RANK = 4
POLICIES = ("keep", "finish", "recompute", "keep", "finish", "abort", "wait")


@dataclass
class AdapterLoad(Load):
    """Requests of the base and of adapters."""

    names: tuple[str, ...] = NAMES

    def _ask(self, client: RolloutClient, rng: np.random.Generator) -> list[Any]:
        """One request: (adapter, prompt, output) of each of its samples."""
        prompt, name = PROMPTS[rng.integers(len(PROMPTS))], ("", *self.names)[rng.integers(1 + len(self.names))]
        options: dict[str, Any] = {"n": 2, "max_tokens": LENGTH, "ignore_eos": True}
        return [
            (name, prompt, output) for output in client.generate(prompt_ids=prompt, adapter=name, **options).outputs
        ]


@pytest.mark.timeout(4 * LONGEST_S)
@pytest.mark.parametrize(("ranks", "tp"), [("one_rank", 1), ("two_ranks", 2)])
def test_every_token_comes_from_the_version_of_the_adapter_that_its_span_claims(
    ranks: str, tp: int, tiny: Checkpoint, request: pytest.FixtureRequest
) -> None:
    service: LiveService = request.getfixturevalue(ranks)
    base = random_weights(tiny.config, 301)
    changes = {name: [adapter(base, seed, RANK) for seed in (10 * n, 10 * n + 1)] for n, name in enumerate(NAMES)}
    run = f"adapters-{uuid.uuid4().hex[:8]}"
    load = AdapterLoad(service.url)
    failures: list[BaseException] = []
    pushes: list[str] = []
    made_of: dict[str, tuple[str, int]] = {}

    def missing() -> str:
        of_adapters = [output for name, _, output in load.answers if name]
        served = {(name, span.adapter_version) for name, _, output in load.answers if name for span in output.spans}
        if len(served) < PUSHES:
            return f"tokens of {len(served)} versions"
        return "" if any(len(output.spans) > 1 for output in of_adapters) else "pushes outside of sequences"

    def train(name: str) -> None:
        try:
            with WeightPublisher(service.push_endpoint, run_id=run, progress=False) as publisher:
                for version in versions(missing):
                    wait_for(load, 3 * version)
                    policy: Any = POLICIES[version % len(POLICIES)]
                    report = publisher.push_adapter(
                        name, changes[name][version % 2], adapter_config(RANK), version, in_flight=policy
                    )
                    made_of[report.digest] = name, version % 2
                    pushes.append(name)
        except BaseException as error:
            failures.append(error)

    with service.publisher(run) as publisher:
        digest = publisher.push(base, 1).digest
        for name in NAMES:
            report = publisher.push_adapter(name, changes[name][0], adapter_config(RANK), 0)
            made_of[report.digest] = name, 0
    with load:
        trainers = [threading.Thread(target=train, args=(name,)) for name in NAMES]
        for trainer in trainers:
            trainer.start()
        for trainer in trainers:
            trainer.join()
    assert not failures
    assert not load.failures
    for name, _, output in load.answers:
        assert {span.digest for span in output.spans} == {digest}
        claims = [(made_of[span.adapter_digest], span.adapter_version) for span in output.spans if name]
        assert all(made == (name, version % 2) for made, version in claims)
    replay = Replay(tiny.config, [base, *(merged(base, one) for name in NAMES for one in changes[name])])
    answers = [answer for answer in load.answers if answer[2].token_ids]
    misfits = [check(replay, *answer) for answer in answers]
    assert np.mean([misfit for misfit in misfits if misfit is not None]) > 0.9, "the versions are too alike"
    compare_bits(tiny, tp, base, changes, answers)
    tokens = sum(len(output.token_ids) for _, _, output in answers)
    print(f"2 trainers, {len(pushes)} pushes: {tokens} tokens of {len(answers)} samples replayed")


def compare_bits(
    tiny: Checkpoint, tp: int, base: Weights, changes: dict[str, list[Weights]], answers: list[Any]
) -> None:
    """Every logprob of every answer is the engine's, with nothing to spare."""
    sets = Sets(partial(_base, base), partial(_change, changes), sum_parts=2)
    exact = ExactReplay(tiny.directory, sets, tp)
    for name, prompt, output in answers:
        passes = output.forward_passes(len(prompt))
        problem = difference(output.logprobs, exact.logprobs(prompt, output.token_ids, passes, 1.0, name))
        assert not problem, f"{problem}; {name}, prompt of {len(prompt)}, {output.spans}"


def _base(base: Weights, _: int) -> Weights:
    return base


def _change(changes: dict[str, list[Weights]], name: str, version: int) -> Weights:
    return changes[name][version % 2]


def check(replay: Replay, name: str, prompt: list[int], output: Output) -> float | None:
    """Derive one response again; returns the share of its tokens that the other version cannot have made."""
    assert output.finish_reason in {"length", "abort"}
    bounds = [(span.start, span.end) for span in output.spans]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == len(output.token_ids)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    assert {span.version for span in output.spans} == {1}, "the model's own version did not move"
    assert all((span.adapter_version is None) == (not name) for span in output.spans)
    versions = [span.adapter_version or 0 for span in output.spans]
    assert versions == sorted(versions)
    tokens = np.array(output.token_ids)[:, None]
    mine, other = (np.take_along_axis(derived(replay, name, prompt, output, s), tokens, 1)[:, 0] for s in (0, 1))
    np.testing.assert_allclose(output.logprobs, mine, atol=TOLERANCE, err_msg=f"{name} {output.spans}")
    return float((np.abs(other - output.logprobs) > 10 * TOLERANCE).mean()) if name else None


def derived(replay: Replay, name: str, prompt: list[int], output: Output, shift: int) -> np.ndarray:
    """[tokens, vocab] log-probabilities, as the spans claim. shift: as if each version had been the one after it."""
    ids, first, rows = np.array(prompt + output.token_ids), len(prompt) - 1, []
    for one in output.forward_passes(len(prompt)):
        owner = np.zeros(len(one.versions), np.int64)
        if name:
            owner[:] = 1 + 2 * NAMES.index(name) + (np.array(one.adapter_versions) + shift) % 2
        rows.append(replay.logprobs(ids[: len(owner)], owner)[first + one.start :])
    return np.concatenate(rows)
