"""One prompt on its way through a replica, and what has come back of it.

A `Flight` outlives the replica that serves it: it is held while the fleet cannot take it, and starts over
on another replica as long as nobody has seen a token of it. Several HTTP requests may watch one flight
(a client that repeats a request id gets the first one's result).
"""

import asyncio
import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from api.errors import ApiError
from worker.messages import Chunk, Fault, FinishReason, Generate, Span

_ids = itertools.count(1)
_PROCESS = secrets.token_hex(4)
"""Replicas outlive an API: what a later one sends them must not bear the names of what this one sent."""


LANDED = -1
"""In place of a sample's index: the flight has ended (or failed: see `error`)."""


@dataclass(slots=True)
class Sample:
    """One sequence so far. Lists run parallel to token_ids."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str = ""
    fault: Fault = ""
    cached_tokens: int = 0
    prompt_logprobs: list[list[tuple[int, float, int]]] | None = None
    _spans: list[Span] = field(default_factory=list)  # the last may have grown since

    @property
    def spans(self) -> list[Span]:
        """They cover [0, len(token_ids)). A list that has been given out stays as it is."""
        if self._spans and self._spans[-1].end != len(self.token_ids):
            last = self._spans[-1]
            grown = Span(last.version, last.start, len(self.token_ids), last.recomputed, last.adapter_version)
            self._spans = [*self._spans[:-1], grown]
        return self._spans

    def add(self, chunk: Chunk) -> None:
        """Append a chunk's tokens and take over what it says of the whole."""
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.top += chunk.top
        self.ranks += chunk.ranks
        self.masks += chunk.masks
        self._spans = chunk.spans
        self.finish = chunk.finish
        self.stop_reason = chunk.stop_reason
        self.error, self.fault = chunk.error, chunk.fault
        self.cached_tokens = chunk.cached_tokens or self.cached_tokens
        self.prompt_logprobs = chunk.prompt_logprobs or self.prompt_logprobs

    def since(self, told: int) -> Chunk:
        """What has come after the first `told` tokens, and what is known of the whole."""
        ids, logprobs = self.token_ids[told:], self.logprobs[told:]
        if told and self.finish is None and not self.top and not self.masks:  # tokens alone, which is the usual case
            return Chunk("", self.index, ids, logprobs, self.spans, cached_tokens=self.cached_tokens)
        return Chunk(
            request_id="",
            index=self.index,
            token_ids=ids,
            logprobs=logprobs,
            spans=self.spans,
            top=self.top[told:],
            ranks=self.ranks[told:],
            masks=self.masks[told:],
            finish=self.finish,
            stop_reason=self.stop_reason,
            error=self.error,
            fault=self.fault,
            cached_tokens=self.cached_tokens,
            prompt_logprobs=None if told else self.prompt_logprobs,
        )


Watcher = Callable[["Flight", int], None]
"""Told the index of a sample that has something new, or LANDED."""


class Flight:
    """One prompt on its way. `request.request_id` is ours and unique; what clients call it stays in `Job`."""

    def __init__(
        self,
        request: Generate,
        *,
        session: str = "",
        min_version: int | None = None,
        max_staleness: int | None = None,
        deadline: float = float("inf"),
    ) -> None:
        self.request = request
        self.session = session
        self.min_version = min_version
        self.max_staleness = max_staleness
        self.deadline = deadline  # loop time until which it may wait for min_version
        self.held_since = 0.0  # loop time since nobody could take it; 0 = it is running
        self.unready_since = 0.0  # the same, but for the time of pauses
        self.started = 0.0
        self.start_version: int | None = None  # live version when it was sent to the replica
        self.attempt_id = ""  # the id the replica knows it by
        self.samples = [Sample(i) for i in range(request.sampling.n)]
        self.open = request.sampling.n
        self.overdue = False  # asked to end because it took too long
        self.error: ApiError | None = None
        self.done = asyncio.Event()
        self._watchers: list[Watcher] = []
        self._streamed = False

    @property
    def sequences(self) -> int:
        """How much it loads a replica."""
        return self.request.sampling.n

    def new_attempt(self) -> Generate:
        """The message for the next replica, under an id no other attempt ever had; forgets what came before."""
        self.attempt_id = f"{_PROCESS}-{next(_ids)}"
        self.samples = [Sample(i) for i in range(self.sequences)]
        self.open = self.sequences
        request = self.request
        return Generate(
            request_id=self.attempt_id,
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            stream=request.stream,
            priority=request.priority,
            cache_salt=request.cache_salt,
            score_from=request.score_from,
            adapter=request.adapter,
            weight_version=request.weight_version,
        )

    def watch(self, watcher: Watcher) -> None:
        """It hears of all that is there and will come, and last that the flight has landed."""
        for sample in self.samples:
            if sample.token_ids or sample.finish:
                watcher(self, sample.index)
                self._streamed = True
        if self.done.is_set():
            watcher(self, LANDED)
        else:
            self._watchers.append(watcher)

    def add(self, chunk: Chunk) -> None:
        """A chunk arrived from the replica."""
        sample = self.samples[chunk.index]
        if sample.finish is not None:
            return
        sample.add(chunk)
        self._tell(chunk.index)
        if chunk.finish is not None:
            self.open -= 1
            if self.open == 0:
                self._end()

    def go_on(self, index: int, token: int, logprob: float) -> None:
        """A sequence has one more token, of the weights that made the one before it."""
        sample = self.samples[index]
        if sample.finish is None:
            sample.token_ids.append(token)
            sample.logprobs.append(logprob)
            for watcher in self._watchers:
                watcher(self, index)
                self._streamed = True

    def can_restart(self) -> bool:
        """Whether losing its replica can go unnoticed: nobody has seen a token."""
        return not self._streamed

    def end_aborted(self, version: int) -> None:
        """End every open sequence with the partial result it has. version: for those without a token."""
        for sample in self.samples:
            if sample.finish is None:
                spans = sample.spans or [Span(version, 0, 0)]
                self.add(Chunk(self.request.request_id, sample.index, [], [], spans, finish="abort"))

    def fail(self, error: ApiError) -> None:
        """It never ran and never will."""
        self.error = error
        self._end()

    def _tell(self, index: int) -> None:
        for watcher in self._watchers:
            watcher(self, index)
            self._streamed = True

    def _end(self) -> None:
        self.done.set()
        for watcher in self._watchers:
            watcher(self, LANDED)
        self._watchers.clear()
