"""Requests and their sequences: what can be taken on, tokens and version spans, when one ends, what is told of it."""

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from worker.detokenizer import TextStream
from worker.engine.base import EngineSpec, Float64, Int32
from worker.grammar import Compiled
from worker.kv_cache import NO_WEIGHTS, KvState, Weights
from worker.logit_edits import LogitEdits
from worker.messages import Chunk, Chunks, Fault, FinishReason, Generate, SamplingParams, Span, Tokens
from worker.sampler import Draw, Pick
from worker.speculation import Proposal
from worker.versions import NO_VERSION, Version

Ending = tuple[FinishReason, int | str | None]
"""Why a sequence ends: its finish reason, and the stop id or string that caused it (None: an end token, or the limit).
"""


class StopRules:
    """What ends the sequences of a request, which share it. limit: most output tokens of each."""

    def __init__(self, sampling: SamplingParams, eos_token_ids: tuple[int, ...], limit: int) -> None:
        self.eos = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        self.ids = frozenset(sampling.stop_token_ids)
        self.strings = [text for text in sampling.stop if text]
        self.overlap = max((len(text) for text in self.strings), default=1) - 1
        self.min_tokens = sampling.min_tokens
        self.limit = limit


class StopCheck:
    """Watches one sequence for the ends that its rules name. stream: its text; needed when there are stop strings."""

    def __init__(self, rules: StopRules, stream: TextStream | None) -> None:
        self._rules = rules
        self._stream = stream
        self._tail = ""

    def after(self, token: int, length: int) -> Ending | None:
        """What token number `length` (from 1) ends the sequence with, if anything. Call once per token."""
        rules = self._rules
        string = self._string_ended_by(token) if rules.strings else None
        if length >= rules.min_tokens:
            if token in rules.ids:
                return "stop", token
            if token in rules.eos:
                return "stop", None
            if string is not None:
                return "stop", string
        return ("length", None) if length >= rules.limit else None

    def _string_ended_by(self, token: int) -> str | None:
        assert self._stream is not None
        piece = self._stream.push(token)
        if not piece:
            return None
        text, told = self._tail + piece, len(self._tail)
        self._tail = text[-self._rules.overlap :] if self._rules.overlap else ""
        found = [
            (at, string)
            for string in self._rules.strings
            # So that it ends inside the piece: one that was let pass may stand in the tail, if another is longer.
            if (at := text.find(string, max(0, told - len(string) + 1))) >= 0
        ]
        return min(found, key=lambda match: match[0])[1] if found else None


PromptLogprobs = list[list[tuple[int, float, int]]]
"""Per prompt token from `Request.score_from` on: (id, logprob, rank), itself first, then the most likely others."""


class Pinned(NamedTuple):
    """The version of the base that a score asks for. version: None = any number. digest: "" = any bytes."""

    version: int | None
    digest: str

    @classmethod
    def by(cls, g: Generate) -> "Pinned | None":
        """What a request asks for; None = nothing."""
        asks = g.weight_version is not None or g.weight_digest
        return cls(g.weight_version, g.weight_digest) if asks else None

    def fits(self, weights: Version) -> bool:
        """Whether this is what is asked for."""
        return self.version in (None, weights.version) and self.digest in ("", weights.digest)

    def __str__(self) -> str:
        number = "" if self.version is None else f" {self.version}"
        return f"weight version{number}" + (f" of digest {self.digest}" if self.digest else "")


@dataclass(eq=False)
class Request:
    """What the n sequences of one `Generate` have in common. arrived: clock seconds; order: lower runs first.

    speculative: every output token after the first is proposed by a draft. Always, or the same seed would not give
    the same tokens: a token's random numbers depend on whether it was proposed.
    """

    origin: bytes
    request_id: str
    sampling: SamplingParams
    stream: bool
    prompt_length: int
    order: tuple[int, int]
    arrived: float
    seed: int
    rules: StopRules
    grammar: Compiled | None = None  # that the output follows
    admitted: float | None = None
    cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    score_from: int = 1
    as_sampled: bool = False  # what is scored is an output: the request's edits and its grammar hold for it
    speculative: bool = False
    pinned: Pinned | None = None  # what alone may compute it
    former: Version | None = None  # the weights before the live ones compute it: they are the pinned version
    adapter_name: str = ""
    adapter: Version | None = None  # that computes it, since it began
    forked: bool = False
    fault: Fault = ""  # whose it is that it ends with an error
    live: list["Sequence"] = field(default_factory=list)

    @property
    def adapter_version(self) -> int | None:
        """Version of the adapter that computes the request; None = the base alone does."""
        return self.adapter.version if self.adapter else None

    @property
    def scoring(self) -> bool:
        """Prompt logprobs are wanted and not complete: the tokens before `score_from` may come from the cache, what
        follows must go through the model.
        """
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length - self.score_from


@dataclass(eq=False)
class Sequence:
    """One continuation of a request's prompt. tokens: prompt, then output. index: which of the request's n samples."""

    request: Request
    index: int
    tokens: list[int]
    kv: KvState
    edits: LogitEdits
    stop: StopCheck
    begun: bool = False
    running: bool = False
    last_token_at: float | None = None
    renewing: bool = False  # its KV was given back; no token has come since
    draft: Proposal | None = None  # of the next token
    plain: bool = False  # nobody needs to see its tokens one by one
    row: int = -1  # in the cohort, which then knows its newest tokens; -1: it is not there
    _spans: list[Span] = field(default_factory=list)
    _made_by: Weights = NO_WEIGHTS  # of the newest token
    _mixed: bool = False  # its KV, as far as it has been used, is of several weights
    _told: int = 0  # output tokens that chunks have reported
    _logprobs: list[float] = field(default_factory=list)  # of those that none has; so are the next three, where asked
    _top: list[list[tuple[int, float]]] = field(default_factory=list)
    _ranks: list[int] = field(default_factory=list)
    _masks: list[list[int]] = field(default_factory=list)
    _reported: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key (priority, arrival, index); the lowest runs first."""
        return (*self.request.order, self.index)

    @property
    def length(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.request.prompt_length

    @property
    def partial(self) -> bool:
        """Whether no token has been drawn from the KV that the sequence holds, so that no span says which weights made
        it.
        """
        return not self.length or self.renewing

    @property
    def pending(self) -> int:
        """How many known tokens have no KV yet; 1 = the sequence decodes."""
        return len(self.tokens) - self.kv.computed

    @property
    def wants_draft(self) -> bool:
        """The sequence can go on once a draft has said what may follow."""
        return self._proposed and self.pending == 1 and self.draft is None

    @property
    def feed(self) -> int:
        """How many tokens the next step is fed: those pending, and a proposed one. Before a draft all but the last
        known one.
        """
        if not self._proposed:
            return self.pending
        if self.pending > 1 or self.draft is None:
            return self.pending - 1
        return 1 + (self.draft.token is not None)

    @property
    def _proposed(self) -> bool:
        return self.request.speculative and self.length > 0

    @property
    def first_version(self) -> int | None:
        """The version that made the oldest output token."""
        return self._spans[0].version if self._spans else None

    def pick(self, row: int) -> Pick:
        """What the sampler needs to draw the next token from row `row` of the step's logits."""
        request = self.request
        return Pick(row, request.sampling, self.edits, request.seed, self.index, self.length)

    def append(self, draw: Draw, made_by: Version) -> None:
        """Take a token sampled from logits that these weights made."""
        self._stamp(made_by, 1)
        self.tokens.append(draw.token)
        self.edits.record(draw.token)
        self._logprobs.append(draw.logprob)
        sampling = self.request.sampling
        if sampling.reports_others:
            self._top.append(list(draw.top))
            self._ranks.append(draw.rank)
        if sampling.sampling_mask:
            self._masks.append(list(draw.mask))

    def extend(self, tokens: list[int], logprobs: list[float], made_by: Version) -> None:
        """Take more tokens, all of these weights, drawn without edits. logprobs: of the last of them, as many as have
        not been reported.
        """
        self._stamp(made_by, len(tokens))
        self.tokens += tokens
        self.edits.pass_over(len(tokens))
        self._told += len(tokens) - len(logprobs)
        self._logprobs += logprobs

    def chunk(
        self,
        live: Version,
        finish: FinishReason | None = None,
        stop_reason: int | str | None = None,
        error: str = "",
    ) -> Chunk:
        """The message of everything that no chunk has reported yet. live: what the span of an empty output shows."""
        request, first = self.request, not self._reported
        reported = Chunk(
            request_id=request.request_id,
            index=self.index,
            token_ids=self.tokens[request.prompt_length + self._told :],
            logprobs=self._logprobs,
            spans=list(self._spans) or [span_of(live, request.adapter, 0, 0)],
            top=self._top,
            ranks=self._ranks,
            masks=self._masks,
            finish=finish,
            stop_reason=stop_reason,
            error=error,
            fault=request.fault if error else "",
            cached_tokens=request.cached_tokens,
            prompt_logprobs=request.prompt_logprobs if first and self.index == 0 and not request.scoring else None,
        )
        self._logprobs, self._top, self._ranks, self._masks = [], [], [], []
        self._told, self._reported = self.length, True
        return reported

    def _stamp(self, base: Version, count: int) -> None:
        """`count` tokens are next. Extend the last span, or begin one: with other weights, and where all KV has become
        that of these.

        Commits are compared and not versions, as a number can come again: forced, rolled back to, in another run.
        """
        adapter = self.request.adapter
        made_by = Weights(base, adapter or NO_VERSION)
        at, other = self.length, made_by != self._made_by
        recomputed = self.renewing and (self._mixed or other) and bool(self._spans)
        if other or recomputed or not self._spans:
            self._mixed = bool(self._spans) and not recomputed
            self._spans.append(span_of(base, adapter, at, at + count, recomputed=recomputed))
        else:
            self._spans[-1] = msgspec.structs.replace(self._spans[-1], end=at + count)
        self._made_by, self.renewing = made_by, False


def span_of(base: Version, adapter: Version | None, start: int, end: int, *, recomputed: bool = False) -> Span:
    """What output tokens [start, end) were made by."""
    if adapter is None:
        return Span(base.version, start, end, recomputed, digest=base.digest)
    return Span(base.version, start, end, recomputed, adapter.version, base.digest, adapter.digest)


def accepted(
    origin: bytes, g: Generate, arrival: int, now: float, spec: EngineSpec, context: int, speculative: bool
) -> Request:
    """The request of a `Generate` that came from the API connection `origin` as number `arrival`. Without a seed of its
    own it gets a random one. context: most tokens a sequence may have.
    """
    sampling, room = g.sampling, context - len(g.prompt_ids)
    limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    return Request(
        origin=origin,
        request_id=g.request_id,
        sampling=sampling,
        stream=g.stream,
        prompt_length=len(g.prompt_ids),
        order=(g.priority, arrival),
        arrived=now,
        seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
        rules=StopRules(sampling, spec.eos_token_ids, max(0, limit)),
        prompt_logprobs=None if sampling.prompt_logprobs is None else [],
        score_from=max(1, g.score_from),  # nothing comes before the first token that could say how likely it is
        as_sampled=g.score_from > 0,
        speculative=speculative,
        pinned=Pinned.by(g),
        adapter_name=g.adapter,
    )


def refusal(g: Generate, spec: EngineSpec, context: int, *, has_text: bool) -> str:
    """Why this request cannot run at all, or "". context: most tokens a sequence may have. has_text: a tokenizer."""
    sampling = g.sampling
    ids = [*g.prompt_ids, *sampling.logit_bias, *(sampling.allowed_token_ids or [])]
    ids += [*sampling.logprob_token_ids, *(i for word in sampling.bad_words for i in word)]
    if not all(sampling.bad_words):
        return "a bad word has no tokens"
    if not g.prompt_ids:
        return "the prompt is empty"
    if len(g.prompt_ids) > context:
        return f"the prompt has {len(g.prompt_ids)} tokens, the context {context}"
    if min(ids) < 0 or max(ids) >= spec.vocab_size:
        return f"token ids must lie in [0, {spec.vocab_size})"
    if any(sampling.stop) and not has_text:
        return "stop strings need a tokenizer"
    return ""


@dataclass(frozen=True)
class Line:
    """One more token of each sequence, of the weights that made the one before it. tokens, logprobs: [R].

    roster: a number that only lines of the same sequences share.
    """

    roster: int
    sequences: list[Sequence]
    tokens: Int32
    logprobs: Float64


class Telling:
    """Makes the messages to API connections of what a tick produced. A line of tokens names its sequences only where
    they are others than those of the connection's last line.
    """

    def __init__(self) -> None:
        self._rosters: dict[bytes, int] = {}  # the last that each connection was told

    def messages(self, origin: bytes, items: Iterable[Chunk | Line]) -> Iterator[Chunks | Tokens]:
        """The messages for one connection, in the order in which things happened."""
        chunks: list[Chunk] = []
        for item in items:
            if isinstance(item, Chunk):
                chunks.append(item)
                continue
            if chunks:
                yield Chunks(chunks)
                chunks = []
            yield self._tokens(origin, item)
        if chunks:
            yield Chunks(chunks)

    def forget(self, origin: bytes) -> None:
        """Forget an API connection, which is gone."""
        self._rosters.pop(origin, None)

    def _tokens(self, origin: bytes, line: Line) -> Tokens:
        known = self._rosters.get(origin) == line.roster
        self._rosters[origin] = line.roster
        return Tokens(
            line.tokens.astype("<i4", copy=False).tobytes(),
            line.logprobs.astype("<f8", copy=False).tobytes(),
            None if known else [(s.request.request_id, s.index) for s in line.sequences],
        )
