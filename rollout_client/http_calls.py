"""Requests and replies of the native HTTP routes, as the clients in http.py send and read them."""

from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar

import httpx
import msgspec

from rollout_client.errors import RolloutError
from rollout_client.spans import ForwardPass, Span, computed_by, forward_passes

T = TypeVar("T")

PauseMode = Literal["abort", "wait", "keep", "recompute"]
InFlight = Literal["keep", "recompute", "abort", "wait"]
Prompt = str | Sequence[str]
PromptIds = Sequence[int] | Sequence[Sequence[int]]

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_S = 10.0
"""How long a connection may take; generation itself is bounded by the server."""
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
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Generation(msgspec.Struct, frozen=True):
    """All samples of a request, prompt-major."""

    request_id: str
    model: str
    outputs: list[Output]
    usage: Usage | None = None


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


class Loaded(msgspec.Struct, frozen=True):
    """A checkpoint directory is live as this version."""

    version: int | None
    report: dict[str, Any] = {}


class Aborted(msgspec.Struct, frozen=True):
    """How many requests were ended."""

    aborted: int


class Call(msgspec.Struct, Generic[T], frozen=True):
    """A request and the type of its reply."""

    method: str
    path: str
    reply: type[T]
    body: dict[str, Any] | None = None
    query: dict[str, Any] = {}
    timeout_s: float | None = 60.0

    @property
    def target(self) -> tuple[str, str]:
        """Method and path."""
        return self.method, self.path

    def decode(self, response: httpx.Response) -> T:
        """The reply, or RequestFailed."""
        if response.is_success:
            return msgspec.json.decode(response.content, type=self.reply)
        raise failure(response)


def failure(response: httpx.Response) -> RequestFailed:
    """The exception for an error reply."""
    try:
        detail = msgspec.json.decode(response.content)["error"]
        return RequestFailed(response.status_code, detail["code"], detail["message"], detail.get("tensors", ()))
    except (msgspec.DecodeError, KeyError, TypeError):
        return RequestFailed(response.status_code, "unknown", response.text[:500] or response.reason_phrase)


def generate(
    prompt: Prompt | None, prompt_ids: PromptIds | None, stream: bool, fields: dict[str, Any]
) -> Call[Generation]:
    """Samples of prompts; fields that are None are left out."""
    body = {name: value for name, value in fields.items() if value is not None}
    if prompt is not None:
        body["prompt"] = prompt
    if prompt_ids is not None:
        body["prompt_ids"] = _plain(prompt_ids)
    if stream:
        body["stream"] = True
    return Call("POST", "/v1/rollout/generate", Generation, body, timeout_s=None)


def _plain(ids: Any) -> Any:
    """Lists of Python ints, whatever array or tuple came."""
    if hasattr(ids, "tolist"):
        return ids.tolist()
    return [i if isinstance(i, int) else _plain(i) if hasattr(i, "__len__") else int(i) for i in ids]


def pause(mode: PauseMode, lease_s: float | None, clear_cache: bool, deadline_s: float) -> Call[PauseState]:
    """Stop stepping."""
    body = {"mode": mode, "lease_s": lease_s, "clear_cache": clear_cache, "deadline_s": deadline_s}
    return Call("POST", "/v1/rollout/pause", PauseState, body, timeout_s=deadline_s + REPLY_MARGIN_S)


def wait(version: int, timeout_s: float) -> Call[Weights]:
    """Until a version is live."""
    query = {"version": version, "timeout_s": timeout_s}
    return Call("GET", "/v1/rollout/weights/wait", Weights, query=query, timeout_s=timeout_s + REPLY_MARGIN_S)


def load(path: str, version: int | None, in_flight: str, deadline_s: float, force: bool) -> Call[Loaded]:
    """Make a directory live."""
    body = {"path": path, "version": version, "in_flight": in_flight, "deadline_s": deadline_s, "force": force}
    return Call("POST", "/v1/rollout/weights/load", Loaded, body, timeout_s=deadline_s + REPLY_MARGIN_S)


def rollback(in_flight: str, deadline_s: float) -> Call[Loaded]:
    """Make the version before the live one live again."""
    body = {"in_flight": in_flight, "deadline_s": deadline_s}
    return Call("POST", "/v1/rollout/weights/rollback", Loaded, body, timeout_s=deadline_s + REPLY_MARGIN_S)


RESUME = Call("POST", "/v1/rollout/resume", PauseState)
PAUSE_STATE = Call("GET", "/v1/rollout/pause", PauseState)
WEIGHTS = Call("GET", "/v1/rollout/weights", Weights)
ABORT_PUSH = Call("POST", "/v1/rollout/weights/abort", dict)
READY = Call("GET", "/ready", dict)


def abort(request_ids: Sequence[str] | None) -> Call[Aborted]:
    """End requests."""
    body = {"request_ids": None if request_ids is None else list(request_ids)}
    return Call("POST", "/v1/rollout/abort", Aborted, body)


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
    """Of every request."""
    return {"authorization": f"Bearer {token}"} if token else {}


def timeout(seconds: float | None) -> httpx.Timeout:
    """For a reply within `seconds`."""
    return httpx.Timeout(seconds, connect=CONNECT_S)
