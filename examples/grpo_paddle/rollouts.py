"""Rollouts over HTTP, one batch ahead of the trainer, on a thread and event loop of their own.

While the trainer learns from batch k, the first half of batch k+1 is being generated; the second half starts right
before the push, so that the new version lands in the middle of it. Workers keep going over that push: one answer
may hold tokens of two versions, and its spans say which.
"""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from examples.grpo_paddle.batch import Batch
from examples.grpo_paddle.task import ANSWER_LEN, EOS, PROMPT_LEN, Ids, problems, rewards
from rollout_client.http import AsyncRolloutClient, Generation, Output

T = TypeVar("T")
CLOSE_S = 5.0


@dataclass(frozen=True)
class Rollouts:
    """A batch to learn from; versions [B, ANSWER_LEN]: the weight version of each answer token, -1 = no token.

    renewed [B, ANSWER_LEN]: the answer token at which everything before it was last computed again; 0 = never.
    rescored: answers that the version which made them scored once more; unequal: those with another bit in a logprob.
    """

    batch: Batch
    versions: Ids
    renewed: Ids
    tokens: int
    rescored: int = 0
    unequal: int = 0


class RolloutStream:
    """Batches of `prompts` x `group` samples: `take` one, then `feed` once before the next `take`."""

    def __init__(
        self, url: str, rng: np.random.Generator, prompts: int = 16, group: int = 16, token: str | None = None
    ):
        self._url, self._token, self._rng = url, token, rng
        self._half, self._group = prompts // 2, group
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._coming: list[Future[Samples]] = []

    def __enter__(self) -> "RolloutStream":
        self._thread.start()
        self._client = self._call(self._connect()).result()
        self.feed()
        self.feed()
        return self

    def __exit__(self, *_: object) -> None:
        for half in self._coming:
            half.cancel()
        with contextlib.suppress(TimeoutError):  # the service may be gone, and its connections with it
            self._call(self._close()).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def take(self) -> Rollouts:
        """The batch that was on its way; the first half of the one after it starts now."""
        halves = [half.result() for half in self._coming]
        self._coming = []
        self.feed()
        return collate(halves)

    def feed(self) -> None:
        """Start half a batch."""
        self._coming.append(self._call(self._sample()))

    def _call(self, work: Coroutine[None, None, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _connect(self) -> AsyncRolloutClient:
        return AsyncRolloutClient(self._url, token=self._token)

    async def _close(self) -> None:
        await self._client.aclose()

    async def _sample(self) -> "Samples":
        prompts, answers = problems(self._rng, self._half)
        calls = (
            self._client.generate(
                prompt_ids=prompt, n=self._group, max_tokens=ANSWER_LEN, temperature=1.0, stop_token_ids=[EOS]
            )
            for prompt in prompts.tolist()
        )
        replies: list[Generation] = await asyncio.gather(*calls)
        outputs = [output for reply in replies for output in reply.outputs]
        if broken := [o for o in outputs if o.finish_reason not in ("stop", "length")]:
            raise RuntimeError(f"{len(broken)} of {len(outputs)} samples ended with {broken[0].finish_reason}")
        wide = np.repeat(prompts, self._group, axis=0)
        same, unequal = await self._rescored(wide[:: self._group], outputs[:: self._group])
        return Samples(wide, np.repeat(answers, self._group, axis=0), outputs, same + unequal, unequal)

    async def _rescored(self, prompts: Ids, outputs: list[Output]) -> tuple[int, int]:
        """How many answers have, and have not, the very logprobs that the version which made them gives them now.

        Of those that one version made which is still live: their importance ratio is exactly 1.
        """
        scores = await self._client.score(prompts.tolist(), [output.token_ids for output in outputs], temperature=1.0)
        found = [
            output.logprobs == score.logprobs
            for output, score in zip(outputs, scores.outputs, strict=True)
            if [span.version for span in output.spans] == [score.weight_version]
        ]
        return found.count(True), found.count(False)


@dataclass(frozen=True)
class Samples:
    """Row by row: prompts [B, PROMPT_LEN], right answers [B, ANSWER_LEN], what came back."""

    prompts: Ids
    answers: Ids
    outputs: list[Output]
    rescored: int = 0
    unequal: int = 0


def collate(parts: list[Samples]) -> Rollouts:
    """One batch of all samples, padded with the end token."""
    outputs = [output for part in parts for output in part.outputs]
    rows = len(outputs)
    ids = np.full((rows, PROMPT_LEN + ANSWER_LEN), EOS, np.int64)
    ids[:, :PROMPT_LEN] = np.concatenate([part.prompts for part in parts])
    answers = np.concatenate([part.answers for part in parts])
    logprobs = np.zeros((rows, ANSWER_LEN), np.float32)
    versions = np.full((rows, ANSWER_LEN), -1, np.int64)
    renewed = np.zeros((rows, ANSWER_LEN), np.int64)
    for row, output in enumerate(outputs):
        length = len(output.token_ids)
        ids[row, PROMPT_LEN : PROMPT_LEN + length] = output.token_ids
        logprobs[row, :length] = output.logprobs
        for span in output.spans:
            versions[row, span.start : span.end] = span.version
            if span.recomputed:
                renewed[row, span.start :] = span.start
    mask = (versions >= 0).astype(np.float32)
    scored = rewards([output.token_ids for output in outputs], answers)
    rescored, unequal = sum(part.rescored for part in parts), sum(part.unequal for part in parts)
    batch = Batch(ids, PROMPT_LEN, logprobs, mask, scored)
    return Rollouts(batch, versions, renewed, int(mask.sum()), rescored, unequal)
