"""verl's two ends of a rollout, with a service between them: the server that agent loops ask, and the rollout that the
training engine gives its weights to. docs/trainers/verl.md puts them in place; neither imports verl.

The calls are those of verl 0.9.1: `generate` and its neighbours of a rollout server's actor, and `BaseRollout`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from rollout_client.curve import TrainerKeys
from rollout_client.errors import PushError, RolloutError, StoreUnavailable
from rollout_client.http import AsyncRolloutClient
from rollout_client.http_calls import DEFAULT_URL, Output, RequestFailed, Unreachable
from rollout_client.protocol import InFlight
from rollout_client.publisher import DEFAULT_ENDPOINT, WeightPublisher
from rollout_client.push_report import PushReport

T = TypeVar("T")

logger = logging.getLogger(__name__)

LEASE_S = 600.0
"""A trainer that dies after `abort_all_requests` holds generation up for this long, not for ever."""
AGAIN_S = 1.0
"""Between two tries of what a service that restarts could not take."""
_NOT_NOW = {429, 502, 503, 504}
"""What a service, or a proxy before one, answers while it is at its limit or restarts."""
_STOP_REASON = {"stop": "completed", "length": "completed", "abort": "aborted"}


@dataclass
class TokenOutput:
    """What verl reads of a server's answer; it has the fields of verl's own class of this name."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: None = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class Server:
    """The actor of a rollout replica: `ray.remote(Server).remote(url)`."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        adapter: str = "",
        response_length: int | None = None,
        token: str | None = None,
        patience_s: float = 600.0,
    ) -> None:
        """adapter: the name under which `Rollout` pushes one, for `lora.merge=False`; "" = the model itself.
        response_length: tokens of a request that says nothing of them; None = what the context leaves. token: the
        service's admin token. patience_s: for how long a service that is away, as while it restarts, or at its limit is
        asked again.
        """
        self._client = AsyncRolloutClient(url, token=token)
        self._patience_s = patience_s
        self._adapter = adapter
        self._response_length = response_length

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        audio_data: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Continue a prompt. `extra_fields` has `global_steps`, `min_global_steps` and `max_global_steps`: the versions
        whose tokens these are. Raises ValueError for what is no text, RequestFailed with what the service says,
        Unreachable where there is none for as long as one is waited for.
        """
        if image_data or video_data or audio_data or mm_processor_kwargs:
            raise ValueError("images, videos and sound are not understood: the models here take token ids")
        fields = dict(sampling_params)
        longest = [fields.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
        asked = next((count for count in longest if count is not None), self._response_length)
        logprobs = fields.pop("logprobs", False)
        if isinstance(logprobs, int) and not isinstance(logprobs, bool):
            fields["logprobs"] = logprobs  # so many alternatives, beside the sampled token's own
        if self._adapter:
            fields["adapter"] = self._adapter
        made = await self._patiently(
            lambda: self._client.generate(  # one that still runs is joined by its id
                prompt_ids=[list(prompt_ids)],
                max_tokens=None if asked is None else max(1, asked),
                request_id=request_id,
                priority=priority,
                **fields,
            )
        )
        return self._answer(made.outputs[0], with_logprobs=logprobs is not False and logprobs is not None)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End what runs with the tokens that it has, and hold what comes until `resume_generation`."""
        del reject_request  # who comes now is held, and served by the next version
        await self._patiently(lambda: self._client.pause("abort", lease_s=LEASE_S))

    async def resume_generation(self) -> None:
        """Let generation go on."""
        await self._patiently(self._client.resume)

    async def clear_kv_cache(self) -> None:
        """Nothing: no key of one version is ever read by a sequence that begins under another."""

    async def release_kv_cache(self) -> None:
        """Nothing: a push needs none of the cache's memory."""

    async def resume_kv_cache(self) -> None:
        """Nothing: it was not released."""

    async def sleep(self) -> None:
        """Nothing: the service has memory of its own."""

    async def wake_up(self) -> None:
        """Nothing: it did not sleep."""

    async def aclose(self) -> None:
        """Close connections."""
        await self._client.aclose()

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer, asked for again while the service is away. Patience is for one time that it is: an answer may
        take longer.
        """
        away_since: float | None = None
        while True:
            asked = time.monotonic()
            try:
                return await ask()
            except (RequestFailed, Unreachable) as error:
                if isinstance(error, RequestFailed) and error.status not in _NOT_NOW:
                    raise
                now = time.monotonic()
                if away_since is None:
                    logger.warning("asked again for %.0f s: %s", self._patience_s, error)
                if away_since is None or now - asked > self._patience_s:
                    away_since = now
                if now - away_since >= self._patience_s:
                    raise
            await asyncio.sleep(AGAIN_S)

    def _answer(self, output: Output, *, with_logprobs: bool) -> TokenOutput:
        made_by = [span.adapter_version if self._adapter else span.version for span in output.spans]
        steps = [version for version in made_by if version is not None]
        extra: dict[str, Any] = {"num_cached_tokens": output.cached_tokens}
        if steps:
            extra |= {"global_steps": steps[-1], "min_global_steps": min(steps), "max_global_steps": max(steps)}
        return TokenOutput(
            token_ids=output.token_ids,
            log_probs=output.logprobs if with_logprobs else None,
            stop_reason=_STOP_REASON.get(output.finish_reason or "", output.finish_reason),
            extra_fields=extra,
        )


class Rollout:
    """What a training worker calls (`BaseRollout`): its weights go to the service, as the version `global_steps`.

    Every rank of the trainer calls it with an iterator that gathers whole tensors on all of them; rank 0 pushes. All or
    nothing: when `update_weights` raises, what is served has not changed.
    """

    sleep_level = 1
    """Read and set by verl; the service does not sleep."""

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        run_id: str,
        rank: int = 0,
        adapter: str = "policy",
        in_flight: InFlight = "keep",
        timeout_s: float = 600.0,
        token: str = "",
        keys: str | Path | TrainerKeys | None = None,
        transport: Literal["auto", "shm", "zmq", "cuda_ipc"] = "auto",
    ) -> None:
        """rank: of this worker among those that share the model. adapter: what an adapter is called that is trained
        with `lora.merge=False`. timeout_s: of a push, with the time in which it waits for a service that restarts. The
        rest: see WeightPublisher.
        """
        self._run_id = run_id
        self._publisher = WeightPublisher(
            endpoint, run_id=run_id, token=token, keys=keys, transport=transport, progress=False
        )
        self._pushes = rank == 0
        self._adapter = adapter
        self._in_flight: InFlight = in_flight
        self._timeout_s = timeout_s
        self._made: dict[str, int] = {}  # adapter, "" = the model -> the step that was made live last

    async def resume(self, tags: Sequence[str]) -> None:
        """Nothing: the service keeps its memory during an update."""

    async def release(self) -> None:
        """Nothing: the service has memory of its own."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Any]],
        wire_format: str = "named_tensors",
        *,
        peft_config: Any = None,
        base_sync_done: bool = True,
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Make (name, tensor) pairs live: the model's or, with a peft_config whose base was synchronised, an adapter's.

        The step that this object has last made live, or no step, is how verl wakes servers that it had put to sleep:
        nothing is pushed then, unless the service has lost it, as by a restart. Raises as WeightPublisher.push;
        ValueError, on every rank alike, for flushes of deltas, for what a checkpoint engine receives, and for the first
        weights where they have no global_steps.
        """
        if wire_format != "named_tensors":
            raise ValueError(f"wire_format {wire_format!r} is not understood: only whole tensors, named_tensors, are")
        if not isinstance(weights, Iterable):
            raise ValueError("weights that a checkpoint engine receives are not understood: let its backend be naive")
        line = self._adapter if peft_config and base_sync_done else ""
        made = self._made.get(line)
        version = made if global_steps is None else global_steps
        if version is None:
            raise ValueError("update_weights needs global_steps: it becomes the version that tokens name")
        needed = self._pushes and (version != made or not await asyncio.to_thread(self._is_live, line, version))
        if not needed:
            for _pair in weights:  # each gathers a tensor over all ranks
                pass
        else:
            pairs = list(weights)  # gathered here: a thread of its own would not have this one's device
            await asyncio.to_thread(self._push, pairs, line, peft_config, version)
        self._made[line] = version

    def close(self) -> None:
        """Disconnect."""
        self._publisher.close()

    def _is_live(self, line: str, version: int) -> bool:
        """Whether the service serves it. Where it cannot be asked the push says why, once the weights are gathered."""
        try:
            welcome = self._publisher.connect()
        except RolloutError:
            return False
        live = welcome.adapters.get(line) if line else (welcome.live_run, welcome.live_version)
        return live is not None and tuple(live) == (self._run_id, version)

    def _push(self, pairs: list[tuple[str, Any]], line: str, peft_config: Any, version: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                report = self._push_once(pairs, line, peft_config, version, max(deadline - time.monotonic(), 0.0))
            except (PushError, StoreUnavailable) as error:
                mendable = isinstance(error, StoreUnavailable) or error.retryable
                if not mendable or time.monotonic() + AGAIN_S > deadline:
                    raise
                logger.warning("version %d is pushed again: %s", version, error)
                time.sleep(AGAIN_S)
            else:
                self._publisher.unshare()  # verl gives the memory back next
                logger.info("version %d is live after %.3f s", version, report.seconds.get("total", 0.0))
                return

    def _push_once(
        self, pairs: list[tuple[str, Any]], line: str, peft_config: Any, version: int, timeout_s: float
    ) -> PushReport:
        how: dict[str, Any] = {"in_flight": self._in_flight, "timeout_s": timeout_s}
        if line:
            return self._publisher.push_adapter(line, pairs, peft_config, version, **how)
        return self._publisher.push([(_of_the_base(name), tensor) for name, tensor in pairs], version, **how)


def _of_the_base(name: str) -> str:
    """As the checkpoint has it: under PEFT, verl calls the base's matrices `...q_proj.base_layer.weight`."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
