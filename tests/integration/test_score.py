"""Scores of a whole service: the bits of sampling, under both versions that are held, whatever happens meanwhile."""

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_client.errors import PushError
from rollout_client.http import RequestFailed, RolloutClient
from rollout_client.http_calls import Output, Score
from rollout_client.publisher import WeightPublisher
from tests.integration.conftest import running
from tests.integration.live import LiveService
from tests.products import needs_bfloat16
from tests.reference.checkpoint import Checkpoint, random_weights

PROMPTS = [[5, 9, 17, 33], [100, 2], [64, 64, 3, 8, 21], list(range(2, 60))]
DOCS = Path(__file__).parents[2] / "docs" / "numerics.md"
PATIENCE_S = 60.0
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(
    scope="module",
    params=[(1, "float32"), pytest.param((2, "bfloat16"), marks=needs_bfloat16)],
    ids=["tp1-float32", "tp2-bfloat16"],
)
def scoring(tiny: Checkpoint, request: pytest.FixtureRequest) -> Iterator[LiveService]:
    """Two replicas, deterministic."""
    tp, dtype = request.param
    yield from running(
        tiny.directory,
        "--replicas",
        "2",
        "--tp",
        str(tp),
        "--dtype",
        dtype,
        "--deterministic",
        "on",
        "--set",
        "store.refuse_non_finite=true",
    )


@pytest.fixture
def rollouts(scoring: LiveService) -> Iterator[RolloutClient]:
    with scoring.client() as client:
        yield client


class Trainer:
    """Pushes random weights, each version one above the one before."""

    def __init__(self, publisher: WeightPublisher, tiny: Checkpoint) -> None:
        self.publisher, self._tiny, self.version = publisher, tiny, 0

    def push(self, **how: Any) -> int:
        self.version += 1
        self.publisher.push(random_weights(self._tiny.config, 1000 + self.version), self.version, **how)
        return self.version


@pytest.fixture
def trainer(scoring: LiveService, tiny: Checkpoint, request: pytest.FixtureRequest) -> Iterator[Trainer]:
    """A run of its own, with a version live."""
    with scoring.publisher(f"run-{request.node.name}-{time.time_ns()}") as publisher:
        made = Trainer(publisher, tiny)
        made.push()
        yield made


def sampled(rollouts: RolloutClient, n: int = 4, **fields: Any) -> list[Output]:
    outputs = rollouts.generate(prompt_ids=PROMPTS, n=n, max_tokens=24, ignore_eos=True, **fields).outputs
    assert all(len(output.spans) == 1 for output in outputs)
    return outputs


def scores(rollouts: RolloutClient, outputs: list[Output], version: int | None, **fields: Any) -> list[Score]:
    prompts = [PROMPTS[output.prompt_index] for output in outputs]
    return rollouts.score(prompts, [o.token_ids for o in outputs], weight_version=version, **fields).outputs


def logprobs(found: list[Output] | list[Score]) -> list[list[float]]:
    return [list(one.logprobs or ()) for one in found]


def test_the_documented_trainer_has_a_ratio_of_exactly_one(
    rollouts: RolloutClient, trainer: Trainer, tiny: Checkpoint
) -> None:
    (text,) = [block for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S) if "ratios" in block]
    names = {"rollouts": rollouts, "publisher": trainer.publisher, "prompts": PROMPTS, "model": None}
    names["trained"] = lambda _: random_weights(tiny.config, 77)
    exec(compile(text, str(DOCS), "exec"), names)
    assert len(names["old"]) == len(names["new"]) > 16


EDITS: dict[str, Any] = {"repetition_penalty": 1.3, "logit_bias": {"7": 2.0}, "frequency_penalty": 0.3}


@pytest.mark.parametrize("how", [{}, {"temperature": 0.7, "top_p": 0.9}, EDITS], ids=["plain", "cut", "edited"])
def test_both_versions_score_what_they_sampled_across_pushes(
    rollouts: RolloutClient, trainer: Trainer, how: dict[str, Any]
) -> None:
    kept = {name: value for name, value in how.items() if name != "top_p"}
    made = {trainer.version: sampled(rollouts, **how)}
    for _ in range(3):
        before, now = trainer.version, trainer.push()
        made[now] = sampled(rollouts, **how)
        for version in (before, now):
            found = scores(rollouts, made[version], version, **kept)
            assert {one.weight_version for one in found} == {version}
            assert logprobs(found) == logprobs(made[version])
        if now > 2:
            with pytest.raises(RequestFailed, match=f"weight_version {before - 1} is not here") as failed:
                scores(rollouts, made[before - 1], before - 1)
            assert failed.value.status == 409


def test_a_push_that_fails_after_it_has_begun_takes_the_version_before(
    rollouts: RolloutClient, trainer: Trainer, tiny: Checkpoint
) -> None:
    """A session that was begun has the slot, whatever becomes of it; the live version goes on."""
    first = sampled(rollouts)
    trainer.push()
    second = sampled(rollouts)
    bad = random_weights(tiny.config, 5)
    bad["model.norm.weight"] = bad["model.norm.weight"] * float("nan")
    with pytest.raises(PushError, match="finite"):
        trainer.publisher.push(bad, trainer.version + 1)
    with pytest.raises(RequestFailed) as failed:
        scores(rollouts, first, trainer.version - 1)
    assert failed.value.status == 409
    assert logprobs(scores(rollouts, second, trainer.version)) == logprobs(second)


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "wait", "abort"])
def test_scores_while_versions_come_are_of_the_one_that_they_name(
    rollouts: RolloutClient, trainer: Trainer, scoring: LiveService, in_flight: str
) -> None:
    """Asked all the time, under pushes: the sampled bits, or 409; and each version is told of some."""
    made, told, over = {trainer.version: sampled(rollouts, n=2)}, [], threading.Event()

    def ask(which: int) -> None:
        with scoring.client() as client:
            while not over.is_set():
                version = max(made) - which
                if version not in made:
                    continue
                try:
                    found = scores(client, made[version], version)
                except RequestFailed as error:
                    if error.status == 409:
                        continue
                    raise
                if all(one.finish_reason == "length" for one in found):
                    told.append((which, logprobs(found) == logprobs(made[version])))
                else:
                    assert in_flight == "abort"

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask, which) for which in (0, 0, 1)]
        try:
            for _ in range(5):
                version = trainer.push(in_flight=in_flight)
                made[version] = sampled(rollouts, n=2)
                deadline, seen = time.monotonic() + PATIENCE_S, len(told)
                while not {0, 1} <= {which for which, _ in told[seen:]}:
                    assert time.monotonic() < deadline
                    for one in asking:
                        assert not one.done() or one.result() is None
                    time.sleep(0.01)
        finally:
            over.set()
        for one in asking:
            one.result(PATIENCE_S)
    assert all(equal for _, equal in told)


def test_scores_of_a_service_asleep_wait_and_the_version_before_is_gone(
    rollouts: RolloutClient, trainer: Trainer, scoring: LiveService
) -> None:
    before = sampled(rollouts)
    version = trainer.push()
    made = sampled(rollouts)
    httpx.post(f"{scoring.url}/v1/rollout/memory/release", timeout=PATIENCE_S).raise_for_status()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(scores, rollouts, made, version)
        time.sleep(0.3)
        assert not waiting.done()
        httpx.post(f"{scoring.url}/v1/rollout/memory/resume", timeout=PATIENCE_S).raise_for_status()
        assert logprobs(waiting.result(PATIENCE_S)) == logprobs(made)
    with pytest.raises(RequestFailed) as failed:
        scores(rollouts, before, version - 1)
    assert failed.value.status == 409


def test_who_hangs_up_leaves_nothing_running(rollouts: RolloutClient, trainer: Trainer, scoring: LiveService) -> None:
    made = sampled(rollouts)
    trainer.push()
    body = {
        "prompt_ids": [PROMPTS[o.prompt_index] for o in made] * 16,
        "token_ids": [o.token_ids for o in made] * 16,
        "weight_version": trainer.version - 1,
    }
    for _ in range(3):
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{scoring.url}/v1/rollout/score", json=body, timeout=0.02)
    deadline = time.monotonic() + PATIENCE_S
    while any(replica.running for replica in rollouts.weights().replicas):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert logprobs(scores(rollouts, made, trainer.version - 1)) == logprobs(made)


def test_after_a_rollback_both_versions_score_under_their_numbers(rollouts: RolloutClient, trainer: Trainer) -> None:
    made = {trainer.version: sampled(rollouts)}
    version = trainer.push()
    made[version] = sampled(rollouts)
    rollouts.rollback()
    for number in (version - 1, version):
        assert logprobs(scores(rollouts, made[number], number)) == logprobs(made[number])
