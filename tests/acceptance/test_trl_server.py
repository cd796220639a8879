"""TRL's own measure of a rollout server: how far its logprobs are from the trainer's, token by token.

The mutations show that the measure would notice: without the sync, with a prefix cache that outlives the
weights, and with logprobs of another distribution than the one sampled from, it must go red.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import RunClient
from tests.acceptance.tools import takes_minutes
from tests.integration.conftest import running
from tests.integration.live import LiveService

STEPS = 20
MUTANT_STEPS = 6
DIFFERENCE = 1e-4
RATIO = 1e-3
TEMPERATURES = ("0.7", "1.0", "1.3")

pytestmark = [takes_minutes, pytest.mark.timeout(600)]


@pytest.fixture
def train(run_client: RunClient, qwen2: Path, tmp_path: Path) -> Any:
    """Trains against a service; what TRL logged, per temperature."""

    def train(live: LiveService, steps: int, sync: str, *temperatures: str) -> Any:
        args = (live.url, live.push_endpoint, qwen2, tmp_path / "out", steps, sync, *temperatures)
        return run_client("trl", "trl_server", *args, timeout_s=540)

    return train


@pytest.fixture
def mutant(qwen2: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveService]:
    """A service started with these options, and with the fault of tests/acceptance/faults that is named, if any."""
    fault, *options = request.param
    if fault:
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "faults" / fault), prepend=":")
    yield from running(qwen2, *options)


def faithful(logged: dict[str, list[float]], steps: int) -> bool:
    """Whether the trainer found the logprobs of every step to be its own."""
    difference = logged["sampling/sampling_logp_difference/mean"]
    ratio = logged["sampling/importance_sampling_ratio/mean"]
    assert len(difference) == len(ratio) == steps
    return max(difference) < DIFFERENCE and all(abs(r - 1) < RATIO for r in ratio)


def test_logprobs_are_the_trainers_own(service: LiveService, train: Any) -> None:
    found = train(service, STEPS, "on", *TEMPERATURES)
    for i, temperature in enumerate(TEMPERATURES, 1):
        logged = found[temperature]["logged"]
        assert faithful(logged, STEPS), (temperature, logged)
        assert found[temperature]["version"] == STEPS * i
        print(temperature, max(logged["sampling/sampling_logp_difference/mean"]))


def test_without_sync_it_goes_red(service: LiveService, train: Any) -> None:
    assert not faithful(train(service, MUTANT_STEPS, "off", "1.0")["1.0"]["logged"], MUTANT_STEPS)


@pytest.mark.parametrize("mutant", [("stale_prefixes",)], indirect=True)
def test_with_prefixes_of_older_weights_it_goes_red(mutant: LiveService, train: Any) -> None:
    assert not faithful(train(mutant, MUTANT_STEPS, "on", "1.0")["1.0"]["logged"], MUTANT_STEPS)


@pytest.mark.parametrize("mutant", [("", "--set", "worker.logprobs_mode=raw")], indirect=True)
def test_with_raw_logprobs_it_goes_red(mutant: LiveService, train: Any) -> None:
    assert not faithful(train(mutant, MUTANT_STEPS, "on", "0.7")["0.7"]["logged"], MUTANT_STEPS)


def test_trls_client_generates_chats_and_scores(service: LiveService, run_client: RunClient) -> None:
    """Its own logprobs of what was generated are those that it was generated with."""
    found = run_client("trl", "trl_client", service.url, service.push_endpoint)
    assert found["tokens"] > 4
    assert found["apart"] < DIFFERENCE
