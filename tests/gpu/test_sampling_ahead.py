"""A scheduler over an engine on the device: steps launched ahead, tokens drawn there, against the host's sampler."""

from typing import Any

import numpy as np
import pytest

from tests.engine_cases import MODELS, Checkpoint
from tests.gpu import gpu_engines
from worker.gpu.driver import CudaError, Driver
from worker.gpu.engine import GpuEngine
from worker.messages import Generate, SamplingParams
from worker.scheduler import Scheduler
from worker.sequence import Line
from worker.versions import Version

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.7, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {3: 2.0, 9: -4.0}, "top_p": 0.8},
    "allowed": {"allowed_token_ids": [1, 2, 3, 5, 8], "temperature": 0.7, "logprobs": 8},
    "bad words": {"bad_words": [[4], [5, 6], [1, 2]], "min_tokens": 7, "stop_token_ids": [2, 3, 4]},
    "named logprobs": {"logprob_token_ids": [5, 1, 5, 30], "repetition_penalty": 1.2},
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
    "prompt": {"prompt_logprobs": 3, "top_k": 9},
    "of three": {"n": 3, "frequency_penalty": 0.5},
    "mask": {"sampling_mask": True, "top_k": 4},
    "on the host": {"logprobs": 1025, "max_tokens": 5},
}


@pytest.fixture(scope="module")
def engine():
    try:
        Driver()
    except CudaError as error:
        pytest.skip(str(error))
    model = Checkpoint(MODELS / "qwen3")
    engine = GpuEngine(gpu_engines.worker_config(model, max_batch=16), model.layout, 0, 0)
    engine.allocate_kv()
    views = model.views()
    engine.bind(engine.prepare(views))
    yield engine
    engine.bind(None)
    del views


def of_version(number):
    """Weights that are not those of another number."""
    return Checkpoint(MODELS / "qwen3").views(change=lambda piece: np.roll(piece, number))


def prepared(engine, views):
    """Nothing stays pinned: the arrays go."""
    found = engine.prepare(views)
    engine._slots.pinned.let_go()
    return found


def play(engine, *, device: bool, mode: str) -> tuple[dict[Any, Any], int]:
    """What each sequence is told, and how many steps were launched ahead. device: else the host draws."""
    scheduler = Scheduler(engine.spec, None, max_batch=16, max_tokens_per_step=64, logprobs_mode=mode)
    for number, (name, fields) in enumerate(KINDS.items()):
        asked = {"max_tokens": 20, "seed": number} | fields
        scheduler.add(b"api", Generate(name, [1 + number, 2, 3, 50], SamplingParams(**asked)))
    told: dict[Any, dict[str, list[Any]]] = {}
    flown, flight = 0, None
    for _ in range(200):
        if scheduler.idle:
            break
        if flight is not None and scheduler.launched_ahead:
            logits, flown = flight, flown + 1
        else:
            batch = scheduler.schedule(Version(1, 100, ""))
            assert batch is not None
            logits = engine.forward(batch)
        flight = scheduler.follow(logits) if device else None
        scheduler.apply(logits if device else np.array(logits[:]))
        for item in scheduler.take_outputs().get(b"api", []):
            assert not isinstance(item, Line), "nothing is streamed"
            assert not item.error, item.error
            kept = told.setdefault(
                (item.request_id, item.index), {"tokens": [], "logprobs": [], "top": [], "prompt": [], "masks": []}
            )
            kept["tokens"] += item.token_ids
            kept["logprobs"] += item.logprobs
            kept["top"] += item.top
            kept["masks"] += item.masks
            kept["prompt"] += item.prompt_logprobs or []
    assert scheduler.idle
    return told, flown


@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_every_kind_gets_the_hosts_tokens_and_logprobs(engine, mode):
    (host, none), (device, flown) = play(engine, device=False, mode=mode), play(engine, device=True, mode=mode)
    assert none == 0
    assert flown >= 12, "all after the one that the host draws for has ended"
    assert device.keys() == host.keys()
    for key, mine in device.items():
        assert mine["tokens"] == host[key]["tokens"], key
        assert mine["masks"] == host[key]["masks"], key
        np.testing.assert_allclose(mine["logprobs"], host[key]["logprobs"], atol=5e-5)
        for name in ("top", "prompt"):
            assert len(mine[name]) == len(host[key][name])
            for a, b in zip(mine[name], host[key][name], strict=True):
                assert [entry[0] for entry in a] == [entry[0] for entry in b], key
                np.testing.assert_allclose([e[1] for e in a], [e[1] for e in b], atol=5e-5)


def test_more_scored_rows_than_the_logits_have_room_for(engine):
    """Rows are made part by part, and are those of a step that scores fewer."""
    prompts = [[1 + (7 * i + j) % 90 for j in range(40)] for i in range(6)]
    found = []
    for at_once in (6, 1):
        scheduler = Scheduler(engine.spec, None, max_batch=16, max_tokens_per_step=256, prefix_caching=False)
        scores: dict[str, Any] = {}
        for start in range(0, len(prompts), at_once):
            for i, prompt in enumerate(prompts[start : start + at_once], start):
                scheduler.add(b"api", Generate(str(i), prompt, SamplingParams(max_tokens=2, prompt_logprobs=2, seed=i)))
            while not scheduler.idle:
                batch = scheduler.schedule(Version(1, 100, ""))
                assert batch is not None
                scheduler.apply(engine.forward(batch))
                for item in scheduler.take_outputs().get(b"api", []):
                    scores[item.request_id] = (item.token_ids, item.prompt_logprobs)
        found.append(scores)
    for name, (tokens, scored) in found[0].items():
        assert tokens == found[1][name][0]
        assert [[(i, rank) for i, _, rank in row] for row in scored] == [
            [(i, rank) for i, _, rank in row] for row in found[1][name][1]
        ]
        flat = [[p for row in rows for _, p, _ in row] for rows in (scored, found[1][name][1])]
        np.testing.assert_allclose(*flat, atol=5e-5)


def flipped(engine, held, *, device, behind):
    """What each sequence is told, of its tokens and of the versions of these, where a flip comes between two steps; on
    a device, while a step before it is computed. behind: another one has been launched behind that.
    """
    old, new = Version(1, 100, ""), Version(2, 101, "")
    scheduler = Scheduler(engine.spec, None, max_batch=16, max_tokens_per_step=64)
    for number in range(9):
        how = ({}, {"temperature": 0.0}, {"repetition_penalty": 1.7})[number % 3]
        asked = {"max_tokens": 24, "seed": number, "ignore_eos": True} | how
        scheduler.add(b"api", Generate(str(number), [1 + number, 2, 3, 50], SamplingParams(**asked)))
    told: dict[str, list[int]] = {str(number): [] for number in range(9)}
    spans: dict[str, Any] = {}

    def hand_out():
        for item in scheduler.take_outputs().get(b"api", []):
            assert not item.error, item.error
            told[item.request_id] += item.token_ids
            spans[item.request_id] = item.spans

    def go_on(weights, logits, following):
        """Take a step in, with one launched behind it; the logits of that."""
        if logits is None:
            batch = scheduler.schedule(weights)
            assert batch is not None
            logits = engine.forward(batch)
        flight = scheduler.follow(logits, following) if device else None
        scheduler.apply(logits if device else np.array(logits[:]))
        hand_out()
        return flight

    engine.bind(held[1])
    flight = None
    for _ in range(6):
        flight = go_on(old, flight, None)
    assert device == (flight is not None)
    if not device:
        for _ in range(2):
            go_on(old, None, None)
        engine.bind(held[2])
    elif behind:
        last = scheduler.follow(flight)  # launched before the store said to flip
        engine.bind_behind(held[2])
        scheduler.apply(flight)
        hand_out()
        flight = go_on(old, last, new)
    else:
        flight = go_on(old, flight, None)
        with engine.launching_with(held[2]):
            ventured = scheduler.follow(flight, new)
        engine.bind_behind(held[2])
        scheduler.apply(flight)
        hand_out()
        flight = ventured
    scheduler.enter(new, recompute=False)
    engine.bind(held[2])  # as at the last word: the version before may be written over from here on
    prepared(engine, of_version(3))
    while not scheduler.idle:
        flight = go_on(new, flight, None)
    held[1] = prepared(engine, of_version(1))
    engine.bind(held[1])
    return told, {name: [(s.version, s.start, s.end) for s in of] for name, of in spans.items()}


def test_steps_around_a_flip_are_each_of_their_own_weights(engine):
    held = {1: prepared(engine, of_version(1))}
    engine.bind(held[1])
    held[2] = prepared(engine, of_version(2))
    host, spans = flipped(engine, held, device=False, behind=False)
    assert set(map(tuple, spans.values())) == {((1, 0, 8), (2, 8, 24))}
    for behind in (False, True):
        assert flipped(engine, held, device=True, behind=behind) == (host, spans), behind
