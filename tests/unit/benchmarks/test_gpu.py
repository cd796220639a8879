"""What the GPU's benchmarks make of what they saw."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from api.schemas.rollout import GenerateRequest
from benchmarks.gpu import commits, replay, sampling, throughput
from benchmarks.gpu.made_up import directory
from worker.logit_edits import LogitEdits
from worker.messages import SamplingParams
from worker.random_streams import uniforms
from worker.sampler import Pick, Sampler


def _events(pushes, *, step=0.01, late=0.0, slow=1.0):
    """A stream of 1,000 steps: `slow` times as long while a push moves, `late` longer where a version begins."""
    now, version, events = 100.0, 1, []
    for _ in range(1000):
        moving = any(begin < now + step / 2 < sealed for begin, sealed, _ in pushes)
        changed = [n for n, (_, _, live) in enumerate(pushes, 2) if n > version and now + step > live]
        now += step * (slow if moving else 1.0) + (late if changed else 0.0)
        version = max([version, *changed])
        events.append((now, 1, version))
    return events


PUSHES = [(102.0, 102.2, 102.25), (104.0, 104.2, 104.25), (106.0, 106.2, 106.25)]


def _judged(**how):
    moves = [(begin, sealed) for begin, sealed, _ in PUSHES]
    windows = [(begin, live + 0.02) for begin, _, live in PUSHES]
    return commits.judged(commits.gaps([_events(PUSHES, **how)]), moves, windows)


def test_a_push_that_costs_nothing_shows_nothing():
    found = _judged()
    assert (found["commits"], found["tokens_an_event"]) == (3, 1)
    assert found["step_ms"] == pytest.approx(10)
    for figure in ("during", "commit_p50", "commit_p99", "quiet_p99"):
        assert found[figure] == pytest.approx(1.0, abs=0.01)


def test_a_late_first_token_of_a_version_and_slow_steps_are_told_apart():
    late = _judged(late=0.02)
    assert late["commit_p99"] == pytest.approx(3.0, abs=0.05)
    assert late["during"] == pytest.approx(1.0, abs=0.01)
    slow = _judged(slow=1.5)
    assert slow["during"] == pytest.approx(1.5, abs=0.05)
    assert slow["commit_p99"] == pytest.approx(1.0, abs=0.01)


def test_rates_are_compared_round_by_round():
    rates = {"ours": {"16": [100.0, 300.0, 90.0]}, "vllm": {"16": [50.0, 100.0, 90.0]}}
    found = throughput.summary(rates)
    assert found["over vllm"]["16"] == {"of medians": 1.11, "least": 1.0}
    assert found["ours"]["16"]["best"] == 300.0


def test_a_prefill_counts_prompt_tokens():
    assert [throughput.tokens(load) for load in throughput.PREFILL.values()] == [64 * 1024]
    assert throughput.tokens(throughput.CELLS["16"]) == 16 * 256


def test_a_made_up_tokenizer_has_a_text_for_every_id(tmp_path):
    model = directory(tmp_path / "model")
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == size
    assert all(tokenizer.decode([number]) for number in (0, 1, 77_777, size - 1))


@pytest.mark.parametrize("fields", [*sampling.WAYS.values(), *replay.ASKED])
def test_what_is_asked_of_a_service_is_what_its_route_reads(fields):
    asked = GenerateRequest(prompt_ids=[1, 2], max_tokens=4, ignore_eos=True, seed=1, **fields)
    made = asked.sampling([], "")
    bias = {int(i): added for i, added in fields.get("logit_bias", {}).items()}
    assert {name: getattr(made, name) for name in fields} == fields | ({"logit_bias": bias} if bias else {})


def test_a_token_at_the_edge_of_its_interval_is_told_from_another():
    """Logits of a device and of numpy differ in their last bits; a random number between the two says two tokens."""
    sampler, sampling = Sampler(512), SamplingParams()
    pick = Pick(0, sampling, LogitEdits(sampling, [], frozenset()), 3, 0, 0)
    (number,) = uniforms([3], [0], [0])
    row = np.full(512, -200.0, np.float32)
    row[8], row[7] = 0.0, np.log(number / (1 - number))
    (drawn,) = sampler.sample(row[None], [pick])
    other = 15 - drawn.token
    assert replay.at_the_edge(sampler, row, pick, other, drawn).token == other
    assert replay.at_the_edge(sampler, row, pick, 9, drawn) is drawn
    row[7] += 1e-3 if drawn.token == 7 else -1e-3
    assert replay.at_the_edge(sampler, row, pick, other, drawn) is drawn
