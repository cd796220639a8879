"""Requests and replies of the native HTTP routes. Each verb is written once, for both clients in http.py."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeVar

import httpx
import msgspec

from rollout_client.errors import RolloutError
from rollout_client.spans import ForwardPass, Span, computed_by, forward_passes
from rollout_client.versions import whole_version

log = logging.getLogger(__name__)

T = TypeVar("T")

PauseMode = Literal["abort", "wait", "keep", "recompute"]
InFlight = Literal["keep", "recompute", "abort", "wait"]
AdapterInFlight = Literal["keep", "recompute", "abort", "wait", "finish"]
Prompt = str | Sequence[str]
PromptIds = Sequence[int] | Sequence[Sequence[int]]

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_S = 10.0
"""How long a connection may take; generation itself is bounded by the server, as long as that is there (http.py)."""
REPLY_MARGIN_S = 10.0
"""How much longer than a verb's own deadline the client waits for its reply."""


class RequestFailed(RolloutError):  # the service answered
    """status: HTTP. code: short name of the reason. tensors: each one that was wrong, for weight loads."""

    def __init__(self, status: int, code: str, message: str, tensors: Sequence[str] = ()) -> None:
        super().__init__(f"{message} [{status} {code}]")
        self.status = status
        self.code = code
        self.message = message
        self.tensors = list(tensors)


class Unreachable(RolloutError):
    """No reply: nothing listens there, or it took too long."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """One alternative for a token."""

    token_id: int
    logprob: float


class PromptTokenLogprob(msgspec.Struct, frozen=True):
    """One candidate for a prompt token; rank 1 = most likely."""

    token_id: int
    logprob: float
    rank: int


class Output(msgspec.Struct, frozen=True):
    """One sample; lists run parallel to token_ids. In streams: only what is new, but spans over the whole."""

    prompt_index: int
    index: int
    token_ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    text: str | None = None
    finish_reason: Literal["stop", "length", "abort", "error"] | None = None
    stop_reason: int | str | None = None
    top_logprobs: list[list[TokenLogprob]] = []
    ranks: list[int] = []
    sampling_masks: list[list[int]] = []
    cached_tokens: int = 0
    prompt_logprobs: list[list[PromptTokenLogprob]] | None = None

    def computed_by(self, prompt_length: int, *, position: int, token: int) -> int:
        """Which version computed position `position` of prompt and output when output token `token` was sampled.

        Not of a stream's pieces. Raises IndexError when the token was not sampled from such a position.
        """
        return computed_by(self.spans, prompt_length, position=position, token=token)

    def forward_passes(self, prompt_length: int) -> list[ForwardPass]:
        """The forward passes that derive all of the output's logprobs again, and whose weights compute what in them."""
        return forward_passes(self.spans, prompt_length)


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request: all of its prompts, all of its samples, and both."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Generation(msgspec.Struct, frozen=True):
    """All samples of a request, prompt-major."""

    request_id: str
    model: str
    outputs: list[Output]
    usage: Usage | None = None


class Score(msgspec.Struct, frozen=True):
    """The score of one list of tokens. logprobs: one each; None when aborted. weight_version: what computed them;
    weight_digest: the bytes of that, as spans have it.
    """

    index: int
    logprobs: list[float] | None
    weight_version: int
    finish_reason: Literal["length", "abort"]
    cached_tokens: int = 0
    weight_digest: str = ""
    adapter_version: int | None = None
    adapter_digest: str | None = None


class Scores(msgspec.Struct, frozen=True):
    """The scores of a request, in the order in which its lists came."""

    request_id: str
    model: str
    outputs: list[Score]
    usage: Usage | None = None
    logprobs_mode: Literal["processed", "raw"] = "processed"


class PauseState(msgspec.Struct, frozen=True):
    """Whether and how generation is paused; held = requests that wait."""

    paused: bool
    held: int
    mode: PauseMode | None = None
    lease_left_s: float | None = None


class LiveVersion(msgspec.Struct, frozen=True):
    """What is served. epoch counts commits and never repeats."""

    run_id: str
    version: int
    epoch: int
    digest: str


class ReplicaWeights(msgspec.Struct, frozen=True):
    """What one replica holds."""

    replica: int
    state: str
    version: int | None
    ready: bool
    running: int
    store: dict[str, Any] | None = None
    kernels: str = ""
    kernels_why: str = ""
    reason: str = ""


class Weights(msgspec.Struct, frozen=True):
    """Everything the service says about weights."""

    live: LiveVersion | None
    replicas: list[ReplicaWeights]
    store_connected: bool
    previous: LiveVersion | None = None
    session: dict[str, Any] | None = None
    last_error: dict[str, Any] | None = None
    last_push: dict[str, Any] | None = None
    history: list[dict[str, Any]] = []
    ahead: dict[str, Any] | None = None  # what is live is in device memory only: how it gets into shared memory
    lost: LiveVersion | None = None  # was live so, and is gone


class Loaded(msgspec.Struct, frozen=True):
    """A checkpoint directory is live as this version."""

    version: int | None
    report: dict[str, Any] = {}


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter. version None: its first push is on its way. bytes: of a version. replicas: epochs they serve."""

    name: str
    run_id: str | None
    version: int | None
    epoch: int | None
    digest: str | None
    rank: int
    modules: int
    dtype: str
    bytes: int
    shared_memory_bytes: int = 0
    previous: dict[str, Any] | None = None
    session: dict[str, Any] | None = None
    last_error: dict[str, Any] | None = None
    last_push: dict[str, Any] | None = None
    replicas: dict[str, int | None] = {}


class Adapters(msgspec.Struct, frozen=True):
    """Every adapter that is served, by name."""

    adapters: list[Adapter]


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter is live as this version."""

    name: str
    version: int
    report: dict[str, Any] = {}


class Aborted(msgspec.Struct, frozen=True):
    """How many requests were ended. unreached: nodes and API processes that did not say so."""

    aborted: int
    unreached: list[str] = []


def _whole(reply: Any) -> Any:
    return reply


class Call(msgspec.Struct, Generic[T], frozen=True):
    """A request, and what its caller gets. reply: of the route. take: what of the reply is handed out."""

    method: str
    path: str
    reply: type[Any]
    take: Callable[[Any], T] = _whole
    body: dict[str, Any] | None = None
    query: dict[str, Any] = {}
    timeout_s: float | None = 60.0

    def decode(self, response: httpx.Response) -> T:
        """What the caller gets. Raises RequestFailed for an error reply."""
        if response.is_success:
            return self.take(msgspec.json.decode(response.content, type=self.reply))
        raise failure(response)


def failure(response: httpx.Response) -> RequestFailed:
    """The exception for an error reply."""
    try:
        detail = msgspec.json.decode(response.content)["error"]
        return RequestFailed(response.status_code, detail["code"], detail["message"], detail.get("tensors", ()))
    except (msgspec.DecodeError, KeyError, TypeError):
        return RequestFailed(response.status_code, "unknown", response.text[:500] or response.reason_phrase)


def generate(
    prompt: Prompt | None = None,
    *,
    prompt_ids: PromptIds | None = None,
    n: int = 1,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    seed: int | None = None,
    session: str | None = None,
    request_id: str | None = None,
    min_weight_version: int | None = None,
    **more: Any,
) -> Call[Generation]:
    """Sample n continuations of each prompt. `more`: any other field of the route's request schema.

    Cancelled on asyncio, it ends the request on the server.
    """
    fields = {
        "n": n,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "session": session,
        "request_id": request_id,
        "min_weight_version": min_weight_version,
    }
    return _generate(prompt, prompt_ids, fields | more)


def stream(prompt: Prompt | None, prompt_ids: PromptIds | None, fields: dict[str, Any]) -> Call[Generation]:
    """Stream what `generate` would reply: the lines of the reply, each for `event`."""
    return _generate(prompt, prompt_ids, fields | {"stream": True})


def score(
    prompt_ids: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    weight_version: int | None = None,
    weight_digest: str | None = None,
    session: str | None = None,
    request_id: str | None = None,
    **more: Any,
) -> Call[Scores]:
    """Logprobs of each list of token_ids behind the prompt at its place, under the live version.

    They are, bit by bit, those that sampling them at this temperature reports. weight_version: under this one only: the
    live one, one to come (it waits), or the one before the live one until the next push takes its memory.
    weight_digest: under the weights of this digest only, as spans name them. RequestFailed (409) when it is not there.
    `more`: the penalties, biases and masks they were sampled with, and any other field of the route's request schema.
    """
    body = {
        "prompt_ids": _plain(prompt_ids, "prompt_ids"),
        "token_ids": _plain(token_ids, "token_ids"),
        "temperature": temperature,
        "weight_version": _or_none(weight_version, "weight_version"),
        "weight_digest": weight_digest,
        "session": session,
        "request_id": request_id,
    }
    body = {name: value for name, value in (body | more).items() if value is not None}
    return Call("POST", "/v1/rollout/score", Scores, body=body, timeout_s=None)


def pause(
    mode: PauseMode = "abort", *, lease_s: float | None = None, clear_cache: bool = True, deadline_s: float = 60.0
) -> Call[PauseState]:
    """Hold new requests and stop stepping on every replica. lease_s: resumes by itself; 0 = never."""
    body = {"mode": mode, "lease_s": lease_s, "clear_cache": clear_cache, "deadline_s": deadline_s}
    return Call("POST", "/v1/rollout/pause", PauseState, body=body, timeout_s=deadline_s + REPLY_MARGIN_S)


def resume() -> Call[PauseState]:
    """Go on. Idempotent."""
    return Call("POST", "/v1/rollout/resume", PauseState)


def pause_state() -> Call[PauseState]:
    """Whether and how generation is paused."""
    return Call("GET", "/v1/rollout/pause", PauseState)


def abort(request_ids: Sequence[str] | None = None) -> Call[int]:
    """End requests by id, or all; their callers get what there is. Returns how many were open.

    Where a node of several could not be asked, the log says which: its requests may go on. The call can be repeated.
    """

    def counted(reply: Aborted) -> int:
        if reply.unreached:
            log.warning("an abort did not reach %s", ", ".join(reply.unreached))
        return reply.aborted

    body = {"request_ids": None if request_ids is None else list(request_ids)}
    return Call("POST", "/v1/rollout/abort", Aborted, counted, body)


def weights() -> Call[Weights]:
    """What is live, what is on its way, who holds what."""
    return Call("GET", "/v1/rollout/weights", Weights)


def wait_for_version(version: int, *, timeout_s: float = 60.0) -> Call[Weights]:
    """Return once this version or a later one is live. RequestFailed (409) after timeout_s."""
    query = {"version": whole_version(version), "timeout_s": timeout_s}
    return Call("GET", "/v1/rollout/weights/wait", Weights, query=query, timeout_s=timeout_s + REPLY_MARGIN_S)


def load_weights(
    path: str,
    *,
    version: int | None = None,
    in_flight: InFlight = "keep",
    deadline_s: float = 180.0,
    force: bool = False,
) -> Call[Loaded]:
    """Make a checkpoint directory on the server live, all or nothing."""
    body: dict[str, Any] = {"path": path, "version": _or_none(version), "in_flight": in_flight}
    body |= {"deadline_s": deadline_s, "force": force}
    return Call("POST", "/v1/rollout/weights/load", Loaded, body=body, timeout_s=deadline_s + REPLY_MARGIN_S)


def rollback(*, in_flight: InFlight = "keep", deadline_s: float = 60.0) -> Call[Loaded]:
    """Serve the version before the live one again. RequestFailed (409) when it is not kept any more."""
    body = {"in_flight": in_flight, "deadline_s": deadline_s}
    return Call("POST", "/v1/rollout/weights/rollback", Loaded, body=body, timeout_s=deadline_s + REPLY_MARGIN_S)


def abort_push() -> Call[None]:
    """End the push in progress, whoever holds it."""
    return Call("POST", "/v1/rollout/weights/abort", dict, lambda reply: None)


def adapters() -> Call[list[Adapter]]:
    """LoRA adapters that are loaded, or are pushed for the first time."""
    return Call("GET", "/v1/rollout/adapters", Adapters, lambda reply: reply.adapters)


def load_adapter(
    name: str,
    path: str,
    *,
    version: int | None = None,
    in_flight: AdapterInFlight = "keep",
    deadline_s: float = 60.0,
    force: bool = False,
) -> Call[LoadedAdapter]:
    """Make a directory on the server, as PEFT saves it, the next version of an adapter."""
    body: dict[str, Any] = {"name": name, "path": path, "version": _or_none(version), "in_flight": in_flight}
    body |= {"deadline_s": deadline_s, "force": force}
    path_ = "/v1/rollout/adapters/load"
    return Call("POST", path_, LoadedAdapter, body=body, timeout_s=deadline_s + REPLY_MARGIN_S)


def unload_adapter(name: str, *, deadline_s: float = 60.0) -> Call[None]:
    """Begin nothing under this name any more. RequestFailed (404) when it is not loaded."""
    body = {"name": name, "deadline_s": deadline_s}
    timeout_s = deadline_s + REPLY_MARGIN_S
    return Call("POST", "/v1/rollout/adapters/unload", dict, lambda reply: None, body, timeout_s=timeout_s)


def rollback_adapter(
    name: str, *, in_flight: AdapterInFlight = "keep", deadline_s: float = 60.0
) -> Call[LoadedAdapter]:
    """Serve the version before an adapter's live one again. RequestFailed (409) when it is not kept any more."""
    body = {"name": name, "in_flight": in_flight, "deadline_s": deadline_s}
    path = "/v1/rollout/adapters/rollback"
    return Call("POST", path, LoadedAdapter, body=body, timeout_s=deadline_s + REPLY_MARGIN_S)


def ready() -> Call[dict[str, Any]]:
    """Health of every replica. RequestFailed (503) while none is ready."""
    return Call("GET", "/ready", dict)


def _generate(prompt: Prompt | None, prompt_ids: PromptIds | None, fields: dict[str, Any]) -> Call[Generation]:
    """The call of a generation. Fields that are None are left out. Raises TypeError, ValueError for what is no prompt
    and no version.
    """
    body = {name: value for name, value in fields.items() if value is not None}
    if "min_weight_version" in body:
        body["min_weight_version"] = whole_version(body["min_weight_version"], "min_weight_version")
    if prompt is not None:
        texts = prompt if isinstance(prompt, list | tuple) else [prompt]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("prompt is text, or a list of texts; token ids are prompt_ids=...")
        body["prompt"] = prompt
    if prompt_ids is not None:
        body["prompt_ids"] = _plain(prompt_ids, "prompt_ids")
    return Call("POST", "/v1/rollout/generate", Generation, body=body, timeout_s=None)


def _or_none(version: int | None, name: str = "version") -> int | None:
    """The version where there is one. Raises as `whole_version`."""
    return None if version is None else whole_version(version, name)


def _plain(ids: Any, name: str) -> Any:
    """Lists of Python ints, whatever array or tuple came. Raises TypeError for text; name: of the argument."""
    if isinstance(ids, str):
        text = " text is prompt=..." if name == "prompt_ids" else ""
        raise TypeError(f"{name} are whole numbers, not {ids[:32]!r};{text}".removesuffix(";"))
    if hasattr(ids, "tolist"):
        return ids.tolist()
    return [i if isinstance(i, int) else _plain(i, name) if hasattr(i, "__len__") else int(i) for i in ids]


def event(line: str) -> Generation | None:
    """One line of a stream; None = nothing to hand out. Raises RequestFailed for an error event."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return None
    data = line[6:]
    if data.startswith('{"error"'):
        detail = msgspec.json.decode(data)["error"]
        raise RequestFailed(detail.get("status", 200), detail["code"], detail["message"])
    return msgspec.json.decode(data, type=Generation)


def headers(token: str | None) -> dict[str, str]:
    """The headers of every request."""
    return {"authorization": f"Bearer {token}"} if token else {}


def timeout(seconds: float | None) -> httpx.Timeout:
    """The timeouts of a request that is to be answered within `seconds`."""
    return httpx.Timeout(seconds, connect=CONNECT_S)
