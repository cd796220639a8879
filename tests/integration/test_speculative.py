"""A checkpoint with a drafting layer, served with and without drafts: the same answers, before a push and after it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from rollout_client.http import Output
from tests.integration.conftest import running
from tests.integration.live import LiveService

MODEL = Path(__file__).parents[1] / "fixtures" / "models" / "ernie45_mtp"
PROMPTS = [np.random.default_rng(n).integers(3, 96, 3 + 5 * n).tolist() for n in range(4)]


@pytest.fixture(scope="module")
def plain() -> Iterator[LiveService]:
    yield from running(MODEL)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def drafting(request: pytest.FixtureRequest) -> Iterator[LiveService]:
    yield from running(MODEL, "--tp", str(request.param), "--speculative", "mtp")


def answers(service: LiveService, **fields: Any) -> list[Output]:
    with service.client() as client:
        reply = client.generate(prompt_ids=PROMPTS, max_tokens=24, ignore_eos=True, **fields)
    return list(reply.outputs)


def counted(service: LiveService) -> tuple[float, float]:
    """Tokens drafted and accepted so far."""
    found = {}
    for line in httpx.get(f"{service.url}/metrics", timeout=10).text.splitlines():
        if line.startswith("rollout_spec_"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0]] = float(value)
    return found["rollout_spec_drafted_tokens_total"], found["rollout_spec_accepted_tokens_total"]


def acceptance(service: LiveService, patience: Any, **fields: Any) -> float:
    before = counted(service)
    answers(service, **fields)
    after = patience(lambda: (now := counted(service))[0] > before[0] and now)
    return (after[1] - before[1]) / (after[0] - before[0])


@pytest.fixture
def patience() -> Any:
    import time

    def wait(found: Any) -> Any:
        """Statistics come every second; the last ones hold all of a load that has ended."""
        until = time.monotonic() + 15
        while not found():
            assert time.monotonic() < until
            time.sleep(0.1)
        time.sleep(1.5)
        return found()

    return wait


def agreeing(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights under which the next token depends on the last one alone, and the drafting layer knows how."""
    made = dict(tensors)
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            made[name] = np.zeros_like(value)
    size = len(tensors["model.norm.weight"])
    made["model.mtp_emb_norm.0.weight"] = np.ones(size, np.float32)
    made["model.mtp_linear_proj.0.weight"] = np.concatenate([np.eye(size), np.zeros((size, size))], 1, dtype=np.float32)
    return made


@pytest.mark.timeout(120)
def test_answers_are_the_models_and_a_push_reaches_the_drafting_layer(
    plain: LiveService, drafting: LiveService, patience: Any
) -> None:
    tensors = load_file(MODEL / "model.safetensors")
    scaled = {name: value * np.float32(0.9) for name, value in tensors.items()}
    for version, weights in enumerate((tensors, agreeing(tensors), scaled)):
        for service in (plain, drafting):
            with service.publisher(f"run-{drafting.name}-{version}") as publisher:
                publisher.push(weights, version, in_flight="keep")
        for ours, theirs in zip(answers(drafting, temperature=0.0), answers(plain, temperature=0.0), strict=True):
            assert ours.token_ids == theirs.token_ids
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
            assert [span.version for span in ours.spans] == [version]
        seeded = [[output.token_ids for output in answers(drafting, n=2, seed=5)] for _ in range(2)]
        assert seeded[0] == seeded[1]
        rate = acceptance(drafting, patience, n=4)
        if version == 1:
            assert rate > 0.98, "the drafting layer does not serve what was pushed"
        else:
            assert rate < 0.6


def test_a_push_without_the_drafting_layer_changes_nothing(drafting: LiveService) -> None:
    tensors = {n: t for n, t in load_file(MODEL / "model.safetensors").items() if "mtp_linear" not in n}
    before = answers(drafting, temperature=0.0)
    with drafting.publisher(f"lacking-{drafting.name}") as publisher, pytest.raises(Exception, match="mtp_linear_proj"):
        publisher.push(tensors, 50)
    after = answers(drafting, temperature=0.0)
    assert [o.token_ids for o in after] == [o.token_ids for o in before]
