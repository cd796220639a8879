"""The clients of a chaos run: they ask for tokens all the time and remember how each request ended."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rollout_client.http import AsyncRolloutClient
from rollout_client.http_calls import RequestFailed, Unreachable
from rollout_client.spans import Span
from tests.reference.checkpoint import CONFIG

HANG_S = 60.0
"""No request may take this long: everything that is broken is mended in a third of it."""


@dataclass
class Sample:
    """One sequence that a client was given, whole or in part."""

    prompt: list[int]
    greedy: bool
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finish: str = ""


@dataclass
class Ending:
    """How a request ended: length, abort, or a refusal or loss by name. Seconds since the epoch of the run."""

    began: float
    ended: float
    how: str
    detail: str = ""


class Clients:
    """`count` clients of the service at `url`, until stopped."""

    def __init__(self, url: str, seed: int, count: int, think_s: float, clock: Callable[[], float]) -> None:
        """think_s: between two requests of a client, on average."""
        self.samples: list[Sample] = []
        self.endings: list[Ending] = []
        self.hung = 0
        self._url = url
        self._seed = seed
        self._count = count
        self._think_s = think_s
        self.clock = clock
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Until `stop`."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._client(number))

    def stop(self) -> None:
        """After the requests under way."""
        self._stop.set()

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self._seed} client {number}")
        async with AsyncRolloutClient(self._url) as client:
            while not self._stop.is_set():
                began = self.clock()
                how, detail = await self._request(client, rng)
                self.endings.append(Ending(began, self.clock(), how, detail))
                await asyncio.sleep(rng.uniform(0, 2 * self._think_s) if how in ("length", "abort") else 0.2)

    async def _request(self, client: AsyncRolloutClient, rng: random.Random) -> tuple[str, str]:
        # A few prompts are common, so that the prefix cache is hit, also right after a push.
        prompts = random.Random(rng.randrange(12))
        prompt = [prompts.randrange(1, CONFIG["vocab_size"]) for _ in range(prompts.randrange(1, 100))]
        count = rng.choice((1, 1, 2))
        samples = [Sample(prompt, rng.random() < 0.5) for _ in range(count)]
        temperature = 0.0 if samples[0].greedy else 1.0
        for sample in samples:
            sample.greedy = temperature == 0.0
        options = {
            "n": count,
            "temperature": temperature,
            "ignore_eos": True,
            "max_tokens": rng.choice((1, 16, 64, 100)),
        }
        stream = rng.random() < 0.5
        try:
            async with asyncio.timeout(HANG_S):
                if stream:
                    async for piece in client.stream(prompt_ids=prompt, **options):
                        take(samples, piece.outputs)
                else:
                    take(samples, (await client.generate(prompt_ids=prompt, **options)).outputs)
        except TimeoutError:
            self.hung += 1
            return "hung", f"{options}, stream={stream}"
        except Unreachable as error:
            return "unreachable", str(error)
        except RequestFailed as error:
            return f"{error.status} {error.code}", error.message
        finally:
            self.samples += [sample for sample in samples if sample.tokens]
        ends = {sample.finish for sample in samples}
        if ends <= {"length", "abort"}:
            return ("abort" if "abort" in ends else "length"), ""
        return "error" if "error" in ends else "no finish", str(sorted(ends))


def take(samples: list[Sample], outputs: list) -> None:
    """Add what came."""
    for output in outputs:
        sample = samples[output.index]
        sample.tokens += output.token_ids
        sample.logprobs += output.logprobs
        sample.spans = output.spans
        sample.finish = output.finish_reason or ""


def now_since(began: float) -> Callable[[], float]:
    """A clock that starts at `began` (monotonic)."""
    return lambda: time.monotonic() - began
