"""No torn weights: every token of every response is derived again from what its spans claim, and from nothing else.

Under all four policies, on one rank and on two; and with everything at once that makes a sequence begin anew. The KV
cache is small, so that sequences are preempted, and steps are, so that an update finds them computed again in part.
`REPLAY_PUSHES=200` makes it the long proof. Where a push lands among tokens is chance: pushes go on, for some time,
until as many have landed inside sequences as a test asks for.

Two very different checkpoints take turns under load. There are two derivations. An independent forward in numpy: a
greedy token must be the most likely one under the claimed weights, and every logprob must be theirs; under the other
checkpoint nearly all of them would be far off, which the test checks too. And an engine of one rank: every logprob must
be its own to the last bit, since the service is deterministic.
"""

import itertools
import os
import re
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from rollout_client.http import Generation, Output, RolloutClient
from rollout_client.protocol import InFlight
from tests.chaos.service import by_name
from tests.integration.live import READY_S, LiveService
from tests.reference.checkpoint import Checkpoint, random_weights
from tests.reference.exact import ExactReplay, Sets, difference
from tests.reference.llama import Replay

PUSHES = int(os.environ.get("REPLAY_PUSHES", "12"))
LONGEST_S = 60 + 2.5 * PUSHES
MORE_S = 90.0
"""How long pushes go on after PUSHES of them, until the load has shown what a test asks about."""
ANSWERS_S = 60.0
"""How long a few answers may take, on a machine that others use, too."""
LENGTH = 40
# Few and long, so that the prefix cache is hit, also right after a push.
PROMPTS = [np.random.default_rng(n).integers(1, 128, 4 + 8 * n).tolist() for n in range(6)]
TOLERANCE = 1e-3
CLOSE = 1e-4
"""Of the derivation in numpy; that of the engine has none."""


@dataclass
class Load:
    """Keeps requests running from `clients` threads until told to stop; remembers every answer."""

    url: str
    clients: int = 4
    streams: bool = False  # half of the requests
    answers: list[Any] = field(default_factory=list)
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
                    self.answers += self._ask(client, rng)
        except BaseException as error:  # shown by the test, which runs in another thread
            self.failures.append(error)

    def _ask(self, client: RolloutClient, rng: np.random.Generator) -> list[Any]:
        """One request: (prompt, temperature, output) of each of its samples."""
        prompt = PROMPTS[rng.integers(len(PROMPTS))]
        temperature = float(rng.choice([0.0, 1.0]))
        options = {"n": 2, "max_tokens": LENGTH, "temperature": temperature, "ignore_eos": True}
        if self.streams and rng.random() < 0.5:
            outputs = joined(client.stream(prompt_ids=prompt, **options))
        else:
            outputs = client.generate(prompt_ids=prompt, **options).outputs
        return [(prompt, temperature, output) for output in outputs]


def joined(pieces: Iterable[Generation]) -> list[Output]:
    """The outputs of a stream that has ended."""
    outputs: dict[int, Output] = {}
    for new in itertools.chain.from_iterable(piece.outputs for piece in pieces):
        old = outputs.get(new.index)
        before: tuple[list[int], list[float]] = (old.token_ids, old.logprobs) if old else ([], [])
        ids, logprobs = before[0] + new.token_ids, before[1] + new.logprobs
        outputs[new.index] = msgspec.structs.replace(new, token_ids=ids, logprobs=logprobs)
    return list(outputs.values())


@pytest.mark.timeout(4 * LONGEST_S)
@pytest.mark.parametrize("in_flight", ["keep", "recompute", "abort", "wait"])
@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_every_token_comes_from_the_version_its_span_claims(
    ranks: str, tiny: Checkpoint, in_flight: InFlight, request: pytest.FixtureRequest
) -> None:
    service: LiveService = request.getfixturevalue(ranks)
    sets = [random_weights(tiny.config, seed) for seed in (201, 202)]
    run = f"replay-{uuid.uuid4().hex[:8]}"
    load = Load(service.url)

    def caught() -> list[Output]:
        """What a push of this policy came upon."""
        outputs = [output for _, _, output in load.answers]
        if in_flight == "abort":
            return [output for output in outputs if output.finish_reason == "abort"]
        return [output for output in outputs if len(output.spans) > 1]

    def missing() -> str:
        served = {span.version for _, _, output in load.answers for span in output.spans}
        if len(served) < PUSHES / 2:
            return f"tokens of {len(served)} versions"
        found = len(caught())
        return f"{found} pushes inside sequences" if in_flight != "wait" and found < PUSHES / 2 else ""

    with service.publisher(run) as publisher:
        made_of = {publisher.push(sets[0], 0).digest: 0}
        with load:
            for version in versions(missing):
                # All eight sequences answer a push that aborts or drains: the next waits for one that came after.
                wait_for(load, (9 if in_flight in {"abort", "wait"} else 3) * version)
                made_of[publisher.push(sets[version % 2], version, in_flight=in_flight).digest] = version % 2
    assert not load.failures
    outputs = [output for _, _, output in load.answers]
    assert all(made_of[span.digest] == span.version % 2 for output in outputs for span in output.spans)
    if in_flight in {"abort", "wait"}:
        assert all(len(output.spans) == 1 for output in outputs)
    replay = Replay(tiny.config, sets)
    misfits = [
        check(replay, *answer, cut=in_flight == "abort" and answer[2].finish_reason == "abort")
        for answer in load.answers
        if answer[2].token_ids
    ]
    compare_bits(tiny, sets, [answer for answer in load.answers if answer[2].token_ids])
    assert np.mean(misfits) > 0.9, "the two checkpoints are too alike for this test to mean anything"
    print(f"{ranks}, {in_flight}: {version} updates, {sum(len(o.token_ids) for o in outputs)} tokens replayed")


def versions(missing: Callable[[], str]) -> Iterator[int]:
    """Of a test's pushes: PUSHES, and more while something is `missing`, which says what; "" = nothing."""
    yield from range(1, PUSHES + 1)
    deadline, version = time.monotonic() + MORE_S, PUSHES
    while what := missing():
        assert time.monotonic() < deadline, f"after {version} pushes only {what}: the test does not ask its question"
        version += 1
        yield version


def wait_for(load: Load, answers: int) -> None:
    """Until so many responses came in."""
    deadline = time.monotonic() + ANSWERS_S
    while len(load.answers) < answers and not load.failures:
        assert time.monotonic() < deadline, f"only {len(load.answers)} of {answers} answers"
        time.sleep(0.01)


def check(replay: Replay, prompt: list[int], temperature: float, output: Output, *, cut: bool = False) -> float:
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
    ours, theirs = (derived(replay, prompt, output, shift) for shift in (0, 1))
    tokens = np.array(output.token_ids)
    if temperature == 0.0:
        behind = ours.max(-1) - np.take_along_axis(ours, tokens[:, None], 1)[:, 0]
        assert behind.max() < CLOSE, f"token {behind.argmax()} is not the one that {output.spans} would pick"
    mine = np.take_along_axis(ours, tokens[:, None], 1)[:, 0]
    other = np.take_along_axis(theirs, tokens[:, None], 1)[:, 0]
    np.testing.assert_allclose(output.logprobs, mine, atol=TOLERANCE, err_msg=str(output.spans))
    return float((np.abs(other - output.logprobs) > 10 * TOLERANCE).mean())


def compare_bits(tiny: Checkpoint, sets: list[Any], answers: list[tuple[list[int], float, Output]]) -> None:
    """Every logprob of every answer is the engine's, with nothing to spare."""
    exact = ExactReplay(tiny.directory, Sets(lambda version: sets[version % 2], sum_parts=2))
    for prompt, temperature, output in answers:
        passes = output.forward_passes(len(prompt))
        problem = difference(output.logprobs, exact.logprobs(prompt, output.token_ids, passes, temperature))
        assert not problem, f"{problem}; prompt of {len(prompt)}, {output.spans}"


def derived(replay: Replay, prompt: list[int], output: Output, shift: int = 0) -> np.ndarray:
    """[tokens, vocab] log-probabilities, as the spans claim. shift: as if each version had been the one after it."""
    ids, first = np.array(prompt + output.token_ids), len(prompt) - 1
    rows = []
    for one in output.forward_passes(len(prompt)):
        owner = (np.array(one.versions) + shift) % 2
        rows.append(replay.logprobs(ids[: len(owner)], owner)[first + one.start :])
    return np.concatenate(rows)


def unmarked(output: Output) -> Output:
    """What a reply would be that does not say when positions were computed again."""
    spans = [msgspec.structs.replace(span, recomputed=False) for span in output.spans]
    return msgspec.structs.replace(output, spans=spans)


class Upsets:
    """Everything that makes sequences begin anew, one after the other, on a service under load."""

    def __init__(self, service: LiveService) -> None:
        self.done: Counter[str] = Counter()
        self._service = service
        self._kinds = itertools.cycle(["pause", "none", "pause", "release", "none", "pause", "kill", "none"])
        self._modes = itertools.cycle(["recompute", "keep", "abort", "wait"])

    def next(self, client: RolloutClient) -> None:
        kind = next(self._kinds)
        self.done[kind] += 1
        if kind == "pause":
            mode = next(self._modes)
            client.pause(mode, lease_s=20.0)
            self.done[mode] += 1
            client.resume()
        elif kind == "release":
            post(self._service, "memory/release", {"tags": ["kv_cache"]})
            post(self._service, "memory/resume", {"tags": ["kv_cache"]})
        elif kind == "kill":
            ranks = {name: pids for name, pids in by_name(self._service).items() if name.startswith("replica-")}
            os.kill(ranks[sorted(ranks)[self.done["kill"] % len(ranks)]][0], signal.SIGKILL)
            self._wait_until_back()

    def _wait_until_back(self) -> None:
        time.sleep(0.2)  # until the API has noticed
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            weights = httpx.get(f"{self._service.url}/v1/rollout/weights").json()
            if all(replica["ready"] for replica in weights["replicas"]):
                return
            time.sleep(0.05)
        raise AssertionError(f"a killed replica is not back: {self._service.tail()}")


def post(service: LiveService, verb: str, body: dict[str, Any]) -> None:
    httpx.post(f"{service.url}/v1/rollout/{verb}", json=body, timeout=30.0).raise_for_status()


def preemptions(service: LiveService) -> float:
    text = httpx.get(f"{service.url}/metrics").text
    found = re.findall(r"^rollout_preempted_sequences_total\S* (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


class Preempted:
    """How many sequences were preempted while it was looked. A replica that was killed counts from nothing again."""

    def __init__(self, service: LiveService) -> None:
        self._service, self._last, self.count = service, preemptions(service), 0.0

    def look(self) -> float:
        now = preemptions(self._service)
        self.count += now - self._last if now >= self._last else now
        self._last = now
        return self.count


class Hidden:
    """Answers that began anew on top of older keys, as they come: they fit nothing without the word `recomputed`."""

    def __init__(self, replay: Replay, answers: list[Any]) -> None:
        self.told = self.count = 0
        self._replay, self._answers, self._looked_at = replay, answers, 0

    def look(self) -> int:
        """How many there are by now."""
        new = self._answers[self._looked_at :]
        self._looked_at += len(new)
        told = [answer for answer in new if any(span.recomputed for span in answer[2].spans)]
        self.told += len(told)
        self.count += sum(not fits(self._replay, *answer) for answer in told)
        return self.count


@pytest.mark.timeout(4 * LONGEST_S)
@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_whatever_makes_a_sequence_begin_anew_its_spans_say_so(
    ranks: str, tiny: Checkpoint, request: pytest.FixtureRequest
) -> None:
    """Preemptions, pauses of every mode, released memory and killed replicas, between pushes of every policy."""
    service: LiveService = request.getfixturevalue(ranks)
    sets = [random_weights(tiny.config, seed) for seed in (201, 202)]
    run = f"upsets-{uuid.uuid4().hex[:8]}"
    policies: Iterator[InFlight] = itertools.cycle(["keep", "keep", "recompute", "keep", "abort", "wait"])
    replay = Replay(tiny.config, sets)
    load = Load(service.url, streams=True)
    preempted, hidden = Preempted(service), Hidden(replay, load.answers)
    upsets = Upsets(service)

    def missing() -> str:
        if kinds := {"recompute", "keep", "abort", "wait", "release", "kill"} - set(upsets.done):
            return f"{dict(upsets.done)}, not {kinds}"
        if not preempted.look():
            return "preemptions of none"
        return f"{hidden.count} sequences with older keys begun anew" if hidden.look() < PUSHES / 4 else ""

    with service.publisher(run) as publisher, service.client() as client:
        publisher.push(sets[0], 0)
        with load:
            for version in versions(missing):
                policy = next(policies)
                publisher.push(sets[version % 2], version, in_flight=policy)
                if policy == "recompute":
                    continue  # the next version comes while everything is being computed again
                time.sleep(0.05)  # tokens of the new version on top of what was kept
                preempted.look()
                upsets.next(client)
                wait_for(load, len(load.answers) + 3)
    assert not load.failures
    answers = [answer for answer in load.answers if answer[2].token_ids]
    assert {answer[2].finish_reason for answer in answers} <= {"length", "abort"}
    misfits = [check(replay, *answer, cut=answer[2].finish_reason == "abort") for answer in answers]
    compare_bits(tiny, sets, answers)
    assert np.mean(misfits) > 0.9, "the two checkpoints are too alike for this test to mean anything"
    hidden.look()
    tokens = sum(len(output.token_ids) for _, _, output in answers)
    print(
        f"{ranks}: {version} updates, {tokens} tokens of {len(answers)} samples replayed; {hidden.told} were "
        f"recomputed, {hidden.count} of which fit nothing without the word; {preempted.count:g} preemptions, "
        f"{dict(upsets.done)}"
    )


def fits(replay: Replay, prompt: list[int], temperature: float, output: Output) -> bool:
    """Whether it could be derived without knowing what was computed again."""
    rows = derived(replay, prompt, unmarked(output))
    mine = np.take_along_axis(rows, np.array(output.token_ids)[:, None], 1)[:, 0]
    return bool((np.abs(mine - output.logprobs) < TOLERANCE).all())
