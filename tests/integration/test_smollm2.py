"""A real language model through the whole service: HF's greedy tokens, Paris, tied embeddings, a push under a stream.

`make model` makes the checkpoint; scripts/make_smollm2_fixture.py made the expected tokens with HF transformers.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.integration.conftest import running
from tests.integration.live import LiveService

MODEL = Path("models/SmolLM2-135M-Instruct")
EMBED = "model.embed_tokens.weight"
STREAMED = 200
CLOSE_LOGITS = 1e-3
LOGPROB_TOLERANCE = 1e-3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    """prompt, ids, logprobs, leads of each prompt."""
    found: list[dict[str, Any]] = json.loads(Path("tests/fixtures/smollm2_greedy.json").read_text())
    return found


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LiveService]:
    """One replica that uses both cores."""
    assert MODEL.exists(), "run `make model` first"
    yield from running(MODEL)


def greedy(live: LiveService, prompts: list[list[int]], tokens: int) -> list[Any]:
    with live.client() as client:
        reply = client.generate(prompt_ids=prompts, max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return reply.outputs


def test_greedy_tokens_and_logprobs_are_those_of_hf(smollm2: LiveService, cases: list[dict[str, Any]]) -> None:
    assert len(cases) == 32
    for case, output in zip(cases, greedy(smollm2, [c["prompt"] for c in cases], 32), strict=True):
        same = [mine == theirs for mine, theirs in zip(output.token_ids, case["ids"], strict=True)]
        until = same.index(False) if False in same else len(same)
        assert until == len(same) or case["leads"][until] < CLOSE_LOGITS, f"{case['prompt']} differs at {until}"
        np.testing.assert_allclose(output.logprobs[:until], case["logprobs"][:until], atol=LOGPROB_TOLERANCE)


def test_the_capital_of_france_is_paris(smollm2: LiveService) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 16,
        "temperature": 0,
    }
    answer = httpx.post(f"{smollm2.url}/v1/chat/completions", json=body, timeout=30).json()
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."


def test_a_bad_word_does_not_come_out(smollm2: LiveService) -> None:
    """Nor does anything else change before its place."""

    def said(**fields: Any) -> str:
        body = {"prompt": "Hi", "max_tokens": 3, "temperature": 0} | fields
        text: str = httpx.post(f"{smollm2.url}/v1/completions", json=body, timeout=30).json()["choices"][0]["text"]
        return text

    assert said() == "-and-"
    without = said(bad_words=["and"])
    assert without.startswith("-")
    assert "and" not in without


def test_tied_embeddings_stay_tied(smollm2: LiveService, cases: list[dict[str, Any]]) -> None:
    """Renaming every token by permuting the one matrix renames prompt and answer alike, if both ends follow it."""
    weights = load_file(MODEL / "model.safetensors")
    embed = weights.pop(EMBED)
    rng = np.random.default_rng(0)
    short = [case for case in cases if min(case["leads"][:8]) > 0.01][:6]
    with smollm2.publisher("tied") as publisher:
        for version, name in enumerate([EMBED, "lm_head.weight", EMBED], start=1):
            order = rng.permutation(len(embed))
            publisher.push(weights | {name: embed[order]}, version)
            assert_renamed(smollm2, short, np.argsort(order))
    for route in ("/clear_load_weight", "/update_model_weight"):
        answer = httpx.get(f"{smollm2.url}{route}", timeout=60)
        assert answer.status_code == 200, answer.text
    assert_renamed(smollm2, short, np.argsort(order))


def assert_renamed(live: LiveService, cases: list[dict[str, Any]], new_id: Any) -> None:
    outputs = greedy(live, [new_id[case["prompt"]].tolist() for case in cases], 8)
    for case, output in zip(cases, outputs, strict=True):
        assert output.token_ids == new_id[case["ids"][:8]].tolist()


def test_the_command_line_pushes_under_a_running_stream(smollm2: LiveService, cases: list[dict[str, Any]]) -> None:
    with smollm2.client() as client:
        live = client.weights().live
        assert live is not None
        stream = client.stream(prompt_ids=cases[0]["prompt"], max_tokens=STREAMED, temperature=0.0, ignore_eos=True)
        pieces = [next(stream)]
        command = [str(Path(sys.executable).with_name("paddle-rollout")), "push", str(MODEL)]
        command += ["--endpoint", smollm2.push_endpoint, "--run-id", "by-hand", "--version", "9"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        pieces += list(stream)
    spans = pieces[-1].outputs[0].spans
    assert [span.version for span in spans] == [live.version, 9]
    assert sum(len(piece.outputs[0].token_ids) for piece in pieces) == STREAMED
    assert [output.token_ids for output in greedy(smollm2, [cases[0]["prompt"]], 8)] == [cases[0]["ids"][:8]]
