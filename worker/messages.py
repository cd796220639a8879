"""Messages between the API and rank 0 of a replica, over ``ipc://{run_dir}/replica-{r}.sock``.

The API's DEALER connects; rank 0's ROUTER binds. One multipart message = one msgpack frame. Rank 0
handles them in arrival order: there is one inbox and so one order. Bad bytes are answered with
`CallFailed` (call "") and counted; the loop goes on.
"""

import struct
from typing import Any, Literal

import msgspec

PauseMode = Literal["abort", "wait", "keep", "recompute"]
FinishReason = Literal["stop", "length", "abort", "error"]
Tag = Literal["weights", "kv_cache"]


class Message(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True):
    """Base of everything on the replica's socket."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How to continue one prompt. Validated by the API; the worker trusts the ranges given here."""

    n: int = 1  # >= 1 sequences from one prefill
    max_tokens: int | None = None  # >= 0; None: whatever fits the context
    min_tokens: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # [0, 1]
    repetition_penalty: float = 1.0  # > 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[
        list[int]
    ] = []  # ids that never come out in this order: the last of them is masked after the others
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int = 0  # how many top alternatives beside the sampled token's own logprob
    logprob_token_ids: list[int] = []  # report these instead of the top ones, after the sampled token itself
    prompt_logprobs: int | None = None  # None = none; N = each prompt token's own and top N
    sampling_mask: bool = False  # report the ids that the grammar and top-k/top-p/min-p left open, per token
    grammar: str = ""  # that the output follows, as llguidance reads it (see worker/grammar.py); "" = none

    @property
    def reports_others(self) -> bool:
        """Whether logprobs of other ids than the sampled one are wanted."""
        return bool(self.logprobs or self.logprob_token_ids)


class Generate(Message, tag="generate", frozen=True):
    """[API] start a request; answered by `Chunks` and `Tokens` until every sequence has a finish reason.

    A replica that cannot take it (draining, too many held, id in use) answers `CallFailed` with the request
    id as call: nothing was begun, so it may be sent to another replica.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    stream: bool = False  # False: one chunk per sequence, when it ends
    priority: int = 0  # lower runs first
    cache_salt: str = ""
    # with prompt_logprobs: tokens before this have none and may come from the prefix cache, those from it on are scored
    # as the output behind them; 0: all are a prompt, whose logprobs know of no penalties, biases or masks
    score_from: int = 0
    adapter: str = ""  # its name; "" = the base alone. It begins with the version that is live then
    weight_version: int | None = None  # of a score: that of the base, and no other; the live one or the one before
    weight_digest: str = ""  # of a score: the digest of that; "" = whichever has the number, or is live


class Abort(Message, tag="abort", frozen=True):
    """[API] end requests by exact id, or all (None). Partial results come as ordinary final chunks."""

    call: str
    request_ids: list[str] | None = None


class Pause(Message, tag="pause", frozen=True):
    """[API] stop stepping. The lease resumes by itself after lease_s (0 = no lease) and says so."""

    call: str
    mode: PauseMode = "abort"
    lease_s: float = 0.0
    clear_cache: bool = True
    deadline_s: float = 60.0  # mode wait: how long to drain


class Resume(Message, tag="resume", frozen=True):
    """[API] go on; idempotent, also a clean answer when nothing is paused."""

    call: str


class Clear(Message, tag="clear", frozen=True):
    """[API] release parameters and/or KV on every rank; groups are shut down with the parameters."""

    call: str
    tags: tuple[Tag, ...] = ("weights", "kv_cache")


class Reload(Message, tag="reload", frozen=True):
    """[API] undo `Clear` for these tags: groups back, live version mapped, KV allocated."""

    call: str
    tags: tuple[Tag, ...] = ("weights", "kv_cache")


class ResetPrefixCache(Message, tag="reset_prefix_cache", frozen=True):
    """[API] forget every cached block that no running sequence holds."""

    call: str


class Verify(Message, tag="verify", frozen=True):
    """[API] checksum what each rank holds -> Done.data {"rank": {"name": "16 hex digits"}}."""

    call: str


class GetStats(Message, tag="get_stats", frozen=True):
    """[API] -> `Stats` now; also makes the sender a subscriber of `Stats` and `StateChanged`."""

    call: str


class Drain(Message, tag="drain", frozen=True):
    """[SUPERVISOR] admit nothing more, finish or abort by the deadline, then exit 0."""

    call: str
    deadline_s: float = 30.0


Fault = Literal["", "request", "adapter", "version"]
"""Whose an error is: the service's own, the request's, which cannot be done as it was asked, that of its adapter's
name, which stands for nothing any more, or that of the version it names, which is not there.
"""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Output tokens [start, end) of a sequence were sampled under this version, with this one of the adapter's.

    recomputed: the keys and values of all positions before them were computed again, under this version, before the
    first of them was sampled. Without it each position keeps those of the version that computed it last: that of the
    token sampled from it, or of the first token for the prompt, or of the last recomputed span before, whichever is
    the newest. A version is the base's and the adapter's together; adapter_version is None without an adapter.
    """

    version: int
    start: int
    end: int
    recomputed: bool = False
    adapter_version: int | None = None
    digest: str = ""  # of the version: which of those that have had its number
    adapter_digest: str = ""  # the same of the adapter's; "" = none


class Chunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one sequence. Lists run parallel to token_ids."""

    request_id: str
    index: int  # which of the n sequences
    token_ids: list[int]
    logprobs: list[float]  # finite; of the distribution sampled from
    spans: list[Span]  # over the whole output so far, [0, n) without gaps; one of [0, 0) when empty
    top: list[list[tuple[int, float]]] = []  # per token: (id, logprob), best first, or as logprob_token_ids says
    ranks: list[int] = []  # per token: rank of the sampled id, 1 = most likely (only with top)
    masks: list[list[int]] = []  # per token: ids left open (sampling_mask); [] = nothing was cut
    finish: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or string that ended it; None: its own EOS, or its grammar
    error: str = ""
    fault: Fault = ""  # whose the error is
    cached_tokens: int = 0  # prompt tokens served from the prefix cache
    # in the first chunk of index 0. Per token after the first: (id, logprob, rank), itself first, then the top N others
    prompt_logprobs: list[list[tuple[int, float, int]]] | None = None


class Chunks(Message, tag="chunks", frozen=True):
    """[RANK 0] everything one tick produced for one API connection."""

    items: list[Chunk]


class Tokens(Message, tag="tokens", frozen=True):
    """[RANK 0] one more token of each of many streamed sequences, made by the weights that made the one before it: the
    last span of each is one longer. Everything else about a sequence comes as a `Chunk`: its first token, the first
    after other weights, its end.

    A step of many costs 12 bytes a sequence, and who they are is said when it changes.
    """

    token_ids: bytes  # int32, little-endian, one of each
    logprobs: bytes  # float64, little-endian
    members: list[tuple[str, int]] | None = None  # request id and index of each; None: as in the message before

    def drawn(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Tokens and logprobs, one of each member. Raises struct.error when they are not whole."""
        count = len(self.token_ids) // 4
        return struct.unpack(f"<{count}i", self.token_ids), struct.unpack(f"<{count}d", self.logprobs)


class Done(Message, tag="done", frozen=True):
    """[RANK 0] a control call took effect on every rank."""

    call: str
    data: dict[str, Any] = {}


class CallFailed(Message, tag="call_failed", frozen=True):
    """[RANK 0] a control call did not take effect. code: conflict | timeout | bad_message | internal, busy: the same
    may succeed a little later; or of a request unknown_adapter: it names one that is not loaded.
    """

    call: str
    code: Literal["conflict", "timeout", "bad_message", "busy", "internal", "unknown_adapter"]
    message: str
    rank: int = 0


class StateChanged(Message, tag="state_changed", frozen=True):
    """[RANK 0] to subscribers: the worker's state or version moved."""

    state: str
    version: int | None
    reason: str = ""
    draining: bool = False  # admits nothing more and will exit
    digest: str = ""  # of the version


class Stats(Message, tag="stats", frozen=True):
    """[RANK 0] to subscribers, every second while busy and every 5 s while idle."""

    call: str
    replica: int
    state: str  # worker.lifecycle.WorkerState value
    pause_mode: PauseMode | None
    version: int | None
    epoch: int
    running: int
    waiting: int
    held: int
    kv_blocks_used: int
    kv_blocks_total: int
    block_size: int
    counters: dict[str, float]  # monotonic: tokens, aborted, preempted, prefix hits/queries, steps, stalls ...
    histograms: dict[str, list[float]]  # samples since the last Stats: step_s, stall_s, ttft_s, itl_s, staleness
    ranks: list[dict[str, Any]] = []  # pid, rss_bytes, private_bytes (without shared slots) per rank
    draining: bool = False  # admits nothing more and will exit
    released: tuple[Tag, ...] = ()  # what a `Clear` released and no `Reload` brought back
    kernels: str = ""  # what computes the steps: "compiled", "onednn", "paddle", "cuda"; "" = no model
    kernels_why: str = ""  # why not the fastest that a CPU has
    deterministic: str = ""  # "on", or "off, because ..."; "" = not said yet
    pause_left_s: float | None = None  # until the lease of the pause in force ends; None = none has one
    digest: str = ""  # of the version


FromApi = Generate | Abort | Pause | Resume | Clear | Reload | ResetPrefixCache | Verify | GetStats | Drain
ToApi = Chunks | Tokens | Done | CallFailed | StateChanged | Stats

encode = msgspec.msgpack.Encoder().encode
decode_from_api = msgspec.msgpack.Decoder(FromApi).decode
decode_to_api = msgspec.msgpack.Decoder(ToApi).decode
