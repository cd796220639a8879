"""No torn weights: every token of every response is derived again from the version its span claims.

Under all four policies, on one rank and on two. `REPLAY_PUSHES=200` makes it the long proof.

Two very different checkpoints take turns under load. The derivation is an independent forward in numpy. A greedy
token must be the most likely one under the claimed weights, and every logprob must be theirs; under the other
checkpoint nearly all of them would be far off, which the test checks too.
"""

import itertools
import os
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from rollout_client.http import Output, RolloutClient
from rollout_client.protocol import InFlight
from tests.integration.conftest import running
from tests.integration.live import LiveService
from tests.reference.checkpoint import Checkpoint, random_weights
from tests.reference.llama import Replay

PUSHES = int(os.environ.get("REPLAY_PUSHES", "12"))
LONGEST_S = 60 + 2.5 * PUSHES
LENGTH = 40
# Few and long, so that the prefix cache is hit, also right after a push.
PROMPTS = [np.random.default_rng(n).integers(1, 128, 4 + 8 * n).tolist() for n in range(6)]
TOLERANCE = 1e-3
CLOSE = 1e-4


@dataclass
class Load:
    """Keeps requests running from `clients` threads until told to stop; remembers every answer."""

    url: str
    clients: int = 4
    answers: list[tuple[list[int], float, Output]] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, number: int) -> None:
        rng = np.random.default_rng(number)
        try:
            with RolloutClient(self.url) as client:
                while not self._stop.is_set():
                    prompt = PROMPTS[rng.integers(len(PROMPTS))]
                    temperature = float(rng.choice([0.0, 1.0]))
                    reply = client.generate(
                        prompt_ids=prompt, n=2, max_tokens=LENGTH, temperature=temperature, ignore_eos=True
                    )
                    self.answers += [(prompt, temperature, output) for output in reply.outputs]
        except BaseException as error:  # shown by the test, which runs in another thread
            self.failures.append(error)


@pytest.fixture(scope="module")
def split(tiny: Checkpoint) -> Iterator[LiveService]:
    """One replica of two ranks."""
    yield from running(tiny.directory, "--tp", "2")


@pytest.mark.timeout(2 * LONGEST_S)
@pytest.mark.parametrize("in_flight", ["keep", "recompute", "abort", "wait"])
@pytest.mark.parametrize("ranks", ["service", "split"])
def test_every_token_comes_from_the_version_its_span_claims(
    ranks: str, tiny: Checkpoint, in_flight: InFlight, request: pytest.FixtureRequest
) -> None:
    service: LiveService = request.getfixturevalue(ranks)
    sets = [random_weights(tiny.config, seed) for seed in (201, 202)]
    run = f"replay-{uuid.uuid4().hex[:8]}"
    with service.publisher(run) as publisher:
        publisher.push(sets[0], 0)
        with Load(service.url) as load:
            for version in range(1, PUSHES + 1):
                # All eight sequences answer a push that aborts or drains: the next waits for one that came after.
                wait_for(load, (9 if in_flight in {"abort", "wait"} else 3) * version)
                publisher.push(sets[version % 2], version, in_flight=in_flight)
    assert not load.failures
    outputs = [output for _, _, output in load.answers]
    caught = {
        "keep": [output for output in outputs if len(output.spans) > 1],
        "recompute": [output for output in outputs if len(output.spans) > 1],
        "abort": [output for output in outputs if output.finish_reason == "abort"],
        "wait": [],
    }[in_flight]
    versions = {span.version for output in outputs for span in output.spans}
    assert in_flight == "wait" or len(caught) >= PUSHES / 2, "the pushes did not land inside running sequences"
    assert len(versions) >= PUSHES / 2
    if in_flight in {"abort", "wait"}:
        assert all(len(output.spans) == 1 for output in outputs)
    replay = Replay(tiny.config, sets)
    misfits = [
        check(replay, in_flight, *answer, cut=in_flight == "abort" and answer[2].finish_reason == "abort")
        for answer in load.answers
        if answer[2].token_ids
    ]
    assert np.mean(misfits) > 0.9, "the two checkpoints are too alike for this test to mean anything"
    print(f"{ranks}, {in_flight}: {PUSHES} updates, {sum(len(o.token_ids) for o in outputs)} tokens replayed")


def wait_for(load: Load, answers: int) -> None:
    """Until so many responses came in."""
    deadline = threading.Event()
    for _ in range(1000):
        if len(load.answers) >= answers or load.failures:
            return
        deadline.wait(0.02)
    raise AssertionError(f"only {len(load.answers)} answers")


def check(
    replay: Replay, in_flight: InFlight, prompt: list[int], temperature: float, output: Output, *, cut: bool = False
) -> float:
    """Derive one response again; returns the share of its tokens that the other checkpoint cannot have made.

    cut: it may have ended early, with its replica, but not before its first token.
    """
    length = len(output.token_ids) if cut else LENGTH
    assert cut or output.finish_reason == "length"
    assert len(output.token_ids) == len(output.logprobs) == length > 0
    bounds = [(span.start, span.end) for span in output.spans]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == length
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    numbers = [span.version for span in output.spans]
    assert numbers == sorted(numbers)
    made_by = np.concatenate([np.full(span.end - span.start, span.version % 2) for span in output.spans])
    ids = np.array(prompt + output.token_ids)
    rows = np.arange(len(prompt) - 1, len(ids) - 1)
    # Position p was computed by whoever sampled the token after it; the prompt, by whoever sampled the first.
    owner = np.concatenate([np.full(len(prompt) - 1, made_by[0]), made_by])
    if in_flight == "keep":
        ours = replay.logprobs(ids[:-1], owner)[rows]
        theirs = replay.logprobs(ids[:-1], 1 - owner)[rows]
    else:
        both = [replay.logprobs(ids[:-1], np.full(len(ids) - 1, which))[rows] for which in (0, 1)]
        ours = np.where(made_by[:, None] == 0, both[0], both[1])
        theirs = np.where(made_by[:, None] == 0, both[1], both[0])
    tokens = np.array(output.token_ids)
    if temperature == 0.0:
        behind = ours.max(-1) - np.take_along_axis(ours, tokens[:, None], 1)[:, 0]
        assert behind.max() < CLOSE, f"token {behind.argmax()} is not the one that {output.spans} would pick"
    mine = np.take_along_axis(ours, tokens[:, None], 1)[:, 0]
    other = np.take_along_axis(theirs, tokens[:, None], 1)[:, 0]
    np.testing.assert_allclose(output.logprobs, mine, atol=TOLERANCE, err_msg=str(output.spans))
    return float((np.abs(other - output.logprobs) > 10 * TOLERANCE).mean())
