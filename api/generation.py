"""A request from prompts to samples: the operation behind every data route.

A `Job` is what one HTTP request asked for: one flight per prompt. Clients that repeat a request id while
the first still runs share its job, and it is ended when the last of them has gone away.

A `Flight` is one prompt on its way, with the `Sample`s that have come back of it. It outlives the replica that serves
it: it is held while the fleet cannot take it, and starts over on another replica as long as nobody has seen a token of
it.
"""

import asyncio
import itertools
import logging
import secrets
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from api.errors import ApiError, BadInput, Conflict, EngineFailed, NotFound, TooMany
from api.model import TOO_LONG, Model
from api.schemas.base import MAX_SEQUENCES
from worker.messages import Chunk, Fault, FinishReason, Generate, SamplingParams, Span

if TYPE_CHECKING:
    from api.lanes import Lane
    from api.replicas import Fleet  # which takes flights

log = logging.getLogger(__name__)

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
_ids = itertools.count(1)
_PROCESS = secrets.token_hex(4)
"""Replicas outlive an API: what a later one sends them must not bear the names of what this one sent."""


LANDED = -1
"""What a watcher is told in place of a sample's index when the flight has ended (or failed: see `error`)."""


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
        """The sample's spans, which cover [0, len(token_ids)). A list that has been given out stays as it is."""
        if self._spans and self._spans[-1].end != len(self.token_ids):
            last = self._spans[-1]
            self._spans = [*self._spans[:-1], msgspec.structs.replace(last, end=len(self.token_ids))]
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
        self.cancelled = False  # asked to end: it never begins again, whatever becomes of its replica
        self.error: ApiError | None = None
        self.done = asyncio.Event()
        self.lane: Lane | None = None  # while it is open, tokens are there and not in the sample
        self._watchers: list[list[Callable[[], None]]] = [[] for _ in (*range(self.open), LANDED)]  # LANDED is the last
        self._streamed = False

    @property
    def sequences(self) -> int:
        """Sequences that the flight adds to a replica's load."""
        return self.request.sampling.n

    def new_attempt(self) -> Generate:
        """The message for the next replica, under an id no other attempt ever had; forgets what came before."""
        self.attempt_id = f"{_PROCESS}-{next(_ids)}"
        self.samples = [Sample(i) for i in range(self.sequences)]
        self.open = self.sequences
        return msgspec.structs.replace(self.request, request_id=self.attempt_id)

    @property
    def is_alone(self) -> bool:
        """Whether there is one sample, one watches it, and its tokens come by no lane yet."""
        return self.sequences == 1 and len(self._watchers[0]) == 1 and self.lane is None

    def watch(self, index: int, watcher: Callable[[], None]) -> None:
        """Have `watcher` called with the sample's index when there is something of it and whenever more comes, and with
        LANDED when the flight has ended.
        """
        if self.lane is not None:
            self.lane.close()  # it says things to one only
        landed = self.done.is_set()
        if index == LANDED:
            if landed:
                watcher()
        elif self.samples[index].token_ids or self.samples[index].finish:
            self._streamed = True
            watcher()
        if not landed:
            self._watchers[index].append(watcher)

    def add(self, chunk: Chunk) -> None:
        """A chunk arrived from the replica."""
        self._settle()
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
        self._settle()
        sample = self.samples[index]
        if sample.finish is None:
            sample.token_ids.append(token)
            sample.logprobs.append(logprob)
            self._tell(index)

    def can_restart(self) -> bool:
        """Whether losing its replica can go unnoticed: nobody has seen a token, and it is not to end anyway."""
        return not self._streamed and not self.cancelled

    def end_aborted(self, version: int, digest: str) -> None:
        """End every open sequence with the partial result it has. version, digest: for those without a token."""
        self._settle()
        for sample in self.samples:
            if sample.finish is None:
                spans = sample.spans or [Span(version, 0, 0, digest=digest)]
                self.add(Chunk(self.request.request_id, sample.index, [], [], spans, finish="abort"))

    def fail(self, error: ApiError) -> None:
        """End the flight with an error: it never ran and never will."""
        self.error = error
        self._end()

    def _settle(self) -> None:
        if self.lane is not None:
            self.lane.settle()

    def _tell(self, index: int) -> None:
        for watcher in self._watchers[index]:
            watcher()
            self._streamed = True

    def _end(self) -> None:
        self.done.set()
        for watcher in self._watchers[LANDED]:
            watcher()
        for watchers in self._watchers:
            watchers.clear()


class Reader:
    """What a stream has not taken yet of a sample: all of it comes as one chunk; or, with LANDED, that its flight has.

    A token only says that there is something new; what it was is read out of the sample when the stream comes. So one
    that cannot keep up with the model gets fewer and larger chunks, and costs less (vLLM merges its outputs in the same
    way).
    """

    __slots__ = ("_flight", "_index", "_new", "_stir", "_told", "event")

    def __init__(
        self, flight: Flight, index: int, stir: Callable[["Reader"], None], event: Callable[[Chunk], bytes]
    ) -> None:
        """stir: called when there is something where there was nothing. event: what is said of a chunk."""
        self._flight = flight
        self._index = index
        self._stir = stir
        self._new = False
        self._told = 0  # tokens
        self.event = event
        flight.watch(index, self.come)

    @property
    def has_told_all(self) -> bool:
        """Whether nothing of the sample is new."""
        return not self._new and self._told == len(self._flight.samples[self._index].token_ids)

    def pass_by(self, tokens: int) -> None:
        """Skip so many tokens, which a lane (api/lanes.py) has told already."""
        self._told += tokens

    def come(self) -> None:
        """Call `stir`, as there is something new, unless that was told and not taken yet."""
        if not self._new:
            self._new = True
            self._stir(self)

    def take(self) -> Chunk | None:
        """What came since the last time; None: the flight has landed. Raises as `Job.samples`."""
        self._new = False
        if self._index == LANDED:
            if self._flight.error is not None:
                raise self._flight.error
            return None
        sample = self._flight.samples[self._index]
        chunk = sample.since(self._told)
        self._told = len(sample.token_ids)
        if chunk.finish == "error":
            raise _failure(chunk)
        return chunk


@dataclass(frozen=True)
class Ask:
    """What a data route wants. prompts: token ids. Times are seconds."""

    prompts: list[list[int]]
    sampling: SamplingParams
    request_id: str = ""
    batch: str = ""
    """What the client calls the request together with others that it sent in one; "" = nothing."""
    stream: bool = False
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    """Name of the adapter to compute with; "" = the base alone."""
    session: str = ""
    min_version: int | None = None
    version_timeout_s: float = 60.0
    max_staleness: int | None = None
    prompt_text: str = ""
    """Text of a conversation's prompt, as the chat template wrote it."""
    may_cut: bool = True
    """Whether max_tokens is cut to what the context leaves; otherwise more is refused, as other servers do."""
    score_from: list[int] | None = None
    """Index of the first token to score, for each prompt; nothing is sampled then. None = this is no score."""
    weight_version: int | None = None
    """The version that has to score, and no other; None = whichever is live."""
    weight_digest: str = ""
    """The digest of what has to score, and no other."""

    def same_work(self, other: "Ask") -> bool:
        """Whether both would sample or score the same (how it is delivered does not matter)."""
        mine, theirs = (
            (
                ask.prompts,
                ask.sampling,
                ask.cache_salt,
                ask.adapter,
                ask.score_from,
                ask.weight_version,
                ask.weight_digest,
            )
            for ask in (self, other)
        )
        return mine == theirs


class Job:
    """One request. Use as a context manager: leaving it early gives up the work unless others watch it."""

    def __init__(self, service: "Generations", request_id: str, ask: Ask, flights: list[Flight]) -> None:
        self.request_id = request_id
        self.ask = ask
        self.flights = flights
        self._service = service
        self._watchers = 0

    def __enter__(self) -> "Job":
        self._watchers += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._watchers -= 1
        if self._watchers == 0:
            self._service.close(self)

    async def samples(self) -> list[list[Sample]]:
        """All samples, per prompt. Raises what kept the request from running, EngineFailed or BadInput if one died."""
        for flight in self.flights:
            await flight.done.wait()
        for flight in self.flights:
            if flight.error is not None:
                raise flight.error
            for sample in flight.samples:
                if sample.finish == "error":
                    raise _failure(sample)
        return [flight.samples for flight in self.flights]


class Aborted(NamedTuple):
    """How many requests were open and have been ended. unreached: nodes and API processes that did not say so."""

    requests: int
    unreached: tuple[str, ...] = ()

    @classmethod
    def sum(cls, several: Iterable["Aborted"]) -> "Aborted":
        """What all of them ended together."""
        found = list(several)
        return cls(sum(one.requests for one in found), tuple(name for one in found for name in one.unreached))


class Generations:
    """Checks requests, starts them, and finds them again by the id their client gave."""

    def __init__(self, fleet: "Fleet", model: Model, *, max_requests: int) -> None:
        self._fleet = fleet
        self._model = model
        self._max_requests = max_requests
        self._jobs: dict[str, Job] = {}
        self.abort_elsewhere: Callable[[list[str] | None, float], Awaitable[Aborted]] = _nobody

    def submit(self, ask: Ask) -> Job:
        """Start a request, or join the running one of the same id. Raises BadInput, Conflict, TooMany."""
        request_id = ask.request_id or f"req-{uuid.uuid4().hex}"
        if (running := self._jobs.get(request_id)) is not None:
            if not running.ask.same_work(ask):
                raise Conflict(f"request id {request_id!r} is in use by a different request")
            return running
        self.check(ask)
        # A stop id that the model cannot sample stops nothing; clients take theirs from a tokenizer that may know more.
        stops = [i for i in ask.sampling.stop_token_ids if i < self._model.vocab_size]
        sampling = msgspec.structs.replace(ask.sampling, stop_token_ids=stops)
        if (there := self._fleet.open_everywhere) + len(ask.prompts) > self._max_requests:
            raise TooMany(f"{there} requests are held or running; the limit is {self._max_requests}")
        deadline = asyncio.get_running_loop().time() + ask.version_timeout_s
        flights = [
            Flight(
                Generate(
                    request_id,
                    ids,
                    sampling,
                    ask.stream,
                    ask.priority,
                    ask.cache_salt,
                    score_from,
                    ask.adapter,
                    ask.weight_version,
                    ask.weight_digest,
                ),
                session=ask.session,
                min_version=ask.min_version,
                max_staleness=ask.max_staleness,
                deadline=deadline,
            )
            for ids, score_from in zip(ask.prompts, ask.score_from or [0] * len(ask.prompts), strict=True)
        ]
        job = Job(self, request_id, ask, flights)
        try:
            for flight in flights:
                self._fleet.submit(flight)
        except BaseException:
            self.close(job)  # nobody has it, so nobody else would give up those that were taken
            raise
        self._jobs[request_id] = job
        return job

    def close(self, job: Job) -> None:
        """Give a job up: nobody watches it any more."""
        if self._jobs.get(job.request_id) is job:
            del self._jobs[job.request_id]
        for flight in job.flights:
            self._fleet.drop(flight)

    async def abort(self, request_ids: list[str] | None, *, timeout_s: float = 10.0) -> Aborted:
        """End requests by exact id, or their batch's, or all; returns how many were open, once they have ended.

        Their callers get what there is. Works while paused. An end that takes longer than timeout_s comes later. Where
        another process of the API, which may have some of them, does not answer, those that do end theirs all the same.
        """
        own, elsewhere = await asyncio.gather(
            self.abort_here(request_ids, timeout_s=timeout_s), self.abort_elsewhere(request_ids, timeout_s)
        )
        if elsewhere.unreached:
            log.warning("an abort did not reach %s, whose requests may go on", ", ".join(elsewhere.unreached))
        return Aborted(own + elsewhere.requests, elsewhere.unreached)

    async def abort_here(self, request_ids: list[str] | None, *, timeout_s: float) -> int:
        """End requests of this process only; see `abort`."""
        named = None if request_ids is None else set(request_ids)
        wanted = [
            job
            for i, job in self._jobs.items()
            if named is None or i in named or (job.ask.batch and job.ask.batch in named)
        ]
        flights = [[f for f in job.flights if not f.done.is_set()] for job in wanted]
        ends = [asyncio.ensure_future(flight.done.wait()) for of_job in flights for flight in of_job]
        for of_job in flights:
            for flight in of_job:
                self._fleet.cancel(flight)
        if ends:
            _, late = await asyncio.wait(ends, timeout=timeout_s)
            for end in late:
                end.cancel()
        return sum(1 for of_job in flights if of_job)

    @property
    def open(self) -> int:
        """Requests in progress; a request of several prompts that another process of the API has counts as many."""
        return len(self._jobs) + self._fleet.open_everywhere - len(self._fleet.flights)

    def check(self, ask: Ask) -> None:
        """Raises BadInput for what no replica could do."""
        model, sampling = self._model, ask.sampling
        if not ask.prompts:
            raise BadInput("no prompt: send at least one")
        if len(ask.prompts) * sampling.n > MAX_SEQUENCES:
            raise BadInput(f"{len(ask.prompts)} prompts x n={sampling.n} is over {MAX_SEQUENCES} sequences; split it")
        for i, ids in enumerate(ask.prompts):
            what = f"prompt {i}" if len(ask.prompts) > 1 else "prompt"
            model.check_prompt(ids, what, whole=ask.score_from is not None)
            if len(ids) > self._fleet.kv_tokens:
                raise BadInput(f"{what} is too long: {len(ids)} tokens, the KV cache holds {self._fleet.kv_tokens:g}")
            room = model.max_model_len - len(ids)
            if not ask.may_cut and sampling.max_tokens is not None and sampling.max_tokens > room:
                raise BadInput(
                    f"{what} has {len(ids)} tokens and {sampling.max_tokens} more are asked for, but {model.limit}: "
                    f"ask for at most {room}",
                    code=TOO_LONG,
                )
        model.check_ids(list(sampling.logit_bias), "logit_bias")
        model.check_ids(sampling.logprob_token_ids, "logprob_token_ids")
        if sampling.allowed_token_ids is not None:
            if not sampling.allowed_token_ids:
                raise BadInput("allowed_token_ids is empty: nothing could be sampled")
            model.check_ids(sampling.allowed_token_ids, "allowed_token_ids")
        sampled = sampling.max_tokens if ask.score_from is None else None
        if sampled is not None and sampling.min_tokens > sampled:
            raise BadInput(f"min_tokens {sampling.min_tokens} is over max_tokens {sampled}")
        if len(sampling.stop) > MAX_STOPS or any(not s or len(s) > MAX_STOP_CHARS for s in sampling.stop):
            raise BadInput(f"stop: at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
        if sampling.stop and model.tokenizer is None:
            raise BadInput("stop strings need a tokenizer, and this checkpoint has none: use stop_token_ids")


async def _nobody(request_ids: list[str] | None, timeout_s: float) -> Aborted:
    """End requests that other processes of the API run: none, where there is one process."""
    return Aborted(0)


def _failure(ended: Sample | Chunk) -> EngineFailed | BadInput | NotFound | Conflict:
    if ended.fault == "adapter":
        return NotFound(ended.error, code="adapter_not_found", param="model")
    if ended.fault == "version":
        return Conflict(ended.error)
    if ended.fault == "request":
        return BadInput(ended.error)
    return EngineFailed(ended.error or "the engine gave no reason")
