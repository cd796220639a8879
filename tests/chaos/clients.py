"""The clients of a chaos run: they ask for tokens all the time and remember how each request ended."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_client.http import AsyncRolloutClient
from rollout_client.http_calls import RequestFailed, Unreachable
from rollout_client.spans import Span
from tests.chaos.crowd import Crowd
from tests.chaos.trainer import ADAPTERS
from tests.reference.checkpoint import CONFIG

GOOD = ("length", "stop", "abort")
"""Ends of a request that nothing went wrong with."""
PATTERNS = {
    "([a-z]{2,7} ){3,12}[.]": "([a-z]{2,7} ){0,12}([a-z]{0,7}|[.])",
    "[0-9]{1,3}([+*-][0-9]{1,3})*=[0-9]+": "([0-9]{1,3}([+*-][0-9]{1,3})*([+*-]|=[0-9]*)?)?",
}
"""What output is held to, and what its beginnings match."""
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
    adapter: str = ""
    pattern: str = ""  # what its text is held to
    masks: list[list[int]] = field(default_factory=list)  # per token: ids that were open, where it is held to something
    host: int = 0


@dataclass
class Ending:
    """How a request ended: length, stop, abort, or a refusal or loss by name. Seconds since the epoch of the run."""

    began: float
    ended: float
    how: str
    detail: str = ""
    adapter: str = ""
    host: int = 0


class Clients(Crowd):
    """Of the services at `urls`, each of one of them."""

    def __init__(self, urls: Sequence[str], seed: int, count: int, think_s: float, clock: Callable[[], float]) -> None:
        """think_s: between two requests of a client, on average."""
        super().__init__(count)
        self.samples: list[Sample] = []
        self.endings: list[Ending] = []
        self.hung = 0
        self._urls = urls
        self._seed = seed
        self._think_s = think_s
        self.clock = clock

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self._seed} client {number}")
        host = number % len(self._urls)
        async with AsyncRolloutClient(self._urls[host]) as client:
            while not self._over.is_set():
                began = self.clock()
                adapter = rng.choice(("", "", *ADAPTERS))
                how, detail = await self._request(client, rng, adapter, host)
                self.endings.append(Ending(began, self.clock(), how, detail, adapter, host))
                await asyncio.sleep(rng.uniform(0, 2 * self._think_s) if how in GOOD else 0.2)

    async def _request(
        self, client: AsyncRolloutClient, rng: random.Random, adapter: str, host: int
    ) -> tuple[str, str]:
        # A few prompts are common, so that the prefix cache is hit, also right after a push.
        prompts = random.Random(rng.randrange(12))
        prompt = [prompts.randrange(1, CONFIG["vocab_size"]) for _ in range(prompts.randrange(1, 100))]
        count = rng.choice((1, 1, 2))
        pattern = rng.choice(("", "", *PATTERNS))
        greedy = not pattern and rng.random() < 0.5  # a mask of greedy tokens says which one was left, not among which
        samples = [Sample(prompt, greedy, adapter=adapter, pattern=pattern, host=host) for _ in range(count)]
        options: dict[str, Any] = {
            "n": count,
            "temperature": 0.0 if greedy else 1.0,
            "ignore_eos": True,
            "max_tokens": rng.choice((1, 16, 64, 100)),
            "adapter": adapter,
        }
        if pattern:
            options |= {"constraint": {"regex": pattern}, "sampling_mask": True}
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
        if ends <= set(GOOD):
            return next(how for how in ("abort", "stop", "length") if how in ends), ""
        return "error" if "error" in ends else "no finish", str(sorted(ends))


def take(samples: list[Sample], outputs: list) -> None:
    """Add what came."""
    for output in outputs:
        sample = samples[output.index]
        sample.tokens += output.token_ids
        sample.logprobs += output.logprobs
        sample.masks += output.sampling_masks
        sample.spans = output.spans
        sample.finish = output.finish_reason or ""


def now_since(began: float) -> Callable[[], float]:
    """A clock that starts at `began` (monotonic)."""
    return lambda: time.monotonic() - began
