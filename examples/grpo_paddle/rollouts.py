"""Rollouts over HTTP, one batch ahead of the trainer, on a thread and event loop of their own.

While the trainer learns from batch k, batch k+1 is being generated; the push of the new version lands in the
middle of it. Workers keep going over that push, so one answer may hold tokens of two versions: its spans say so.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from examples.grpo_paddle.grpo import Batch
from examples.grpo_paddle.task import ANSWER_LEN, EOS, PROMPT_LEN, problems, rewards
from rollout_client.http import AsyncRolloutClient, Generation, Output

T = TypeVar("T")


@dataclass(frozen=True)
class Rollouts:
    """A batch to learn from; versions [B, ANSWER_LEN]: the weight version of each answer token, -1 = no token."""

    batch: Batch
    versions: npt.NDArray[np.int64]
    tokens: int


class RolloutStream:
    """Keeps one batch of `prompts` x `group` samples on its way. Use as a context manager."""

    def __init__(self, url: str, rng: np.random.Generator, prompts: int = 16, group: int = 16):
        self._url, self._rng = url, rng
        self._prompts, self._group = prompts, group
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)

    def __enter__(self) -> "RolloutStream":
        self._thread.start()
        self._client = self._call(self._connect()).result()
        self._next = self._call(self._sample())
        return self

    def __exit__(self, *_: object) -> None:
        self._next.cancel()
        self._call(self._close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def take(self) -> Rollouts:
        """The batch that was on its way; the one after it starts now."""
        rollouts = self._next.result()
        self._next = self._call(self._sample())
        return rollouts

    def _call(self, work: Coroutine[None, None, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _connect(self) -> AsyncRolloutClient:
        return AsyncRolloutClient(self._url)

    async def _close(self) -> None:
        await self._client.aclose()

    async def _sample(self) -> Rollouts:
        prompts, answers = problems(self._rng, self._prompts)
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
        return collate(np.repeat(prompts, self._group, axis=0), np.repeat(answers, self._group, axis=0), outputs)


def collate(prompts: npt.NDArray[np.int64], answers: npt.NDArray[np.int64], outputs: list[Output]) -> Rollouts:
    """Rows of prompts [B, PROMPT_LEN] with their samples, padded with the end token."""
    rows = len(outputs)
    ids = np.full((rows, PROMPT_LEN + ANSWER_LEN), EOS, np.int64)
    ids[:, :PROMPT_LEN] = prompts
    logprobs = np.zeros((rows, ANSWER_LEN), np.float32)
    versions = np.full((rows, ANSWER_LEN), -1, np.int64)
    for row, output in enumerate(outputs):
        length = len(output.token_ids)
        ids[row, PROMPT_LEN : PROMPT_LEN + length] = output.token_ids
        logprobs[row, :length] = output.logprobs
        for span in output.spans:
            versions[row, span.start : span.end] = span.version
    mask = (versions >= 0).astype(np.float32)
    scored = rewards([output.token_ids for output in outputs], answers)
    return Rollouts(Batch(ids, PROMPT_LEN, logprobs, mask, scored), versions, int(mask.sum()))
