"""TRL's GRPOTrainer: a `rollout_func` that pushes what was trained and samples from it. TRL stays as it is.

    trainer = GRPOTrainer(..., rollout_func=rollout_func(url, endpoint, run_id="run-7"))

Weights are read with `model.named_parameters()` of the unwrapped model on the main process: one process or
DDP. Sharded trainers (FSDP, ZeRO-3) push slices instead, see rollout_client.slices.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from rollout_client.adapters.push import Pusher
from rollout_client.curve import TrainerKeys
from rollout_client.http import RolloutClient
from rollout_client.http_calls import DEFAULT_URL
from rollout_client.publisher import DEFAULT_ENDPOINT

Rollout = dict[str, Any]


def rollout_func(
    url: str = DEFAULT_URL,
    endpoint: str = DEFAULT_ENDPOINT,
    *,
    run_id: str,
    push: bool = True,
    token: str | None = None,
    push_token: str = "",
    push_keys: str | Path | TrainerKeys | None = None,
    **sampling: Any,
) -> "RolloutFunc":
    """Make one. sampling: fields of /v1/rollout/generate that replace what the trainer's arguments say.

    push: send the weights whenever the trainer has made a step. The returned object has `push.counters`. token,
    push_token, push_keys: of the service's HTTP, and of its store.
    """
    pusher = Pusher(endpoint, run_id=run_id, token=push_token, keys=push_keys) if push else None
    return RolloutFunc(RolloutClient(url, token=token), pusher, sampling)


class RolloutFunc:
    """See rollout_func. Answers prompt_ids, completion_ids, logprobs, and weight_spans for reward functions: per sample
    spans (rollout_client.spans) as tuples: version, start, end, recomputed, adapter_version, digest, adapter_digest.
    """

    def __init__(self, client: RolloutClient, push: Pusher | None, sampling: dict[str, Any]) -> None:
        self.push = push
        self._client = client
        self._sampling = sampling
        self._pushed_at: int | None = None

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> Rollout:
        """One completion per prompt, in order. prompts: strings or conversations, repeated as TRL repeats them."""
        self._sync(trainer)
        prompt_ids = tokenized(prompts, trainer)
        groups = [len(list(same)) for _, same in groupby(prompt_ids)]
        # Equal prompts stand together; where all groups are alike, each prompt is computed once.
        n = groups[0] if len(set(groups)) == 1 else 1
        asked = self._arguments(trainer) | self._sampling
        result = self._client.generate(prompt_ids=prompt_ids[::n], n=n, **asked)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [output.token_ids for output in result.outputs],
            "logprobs": [output.logprobs for output in result.outputs],
            "weight_spans": [[msgspec.structs.astuple(s) for s in output.spans] for output in result.outputs],
        }

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._client.close()
        if self.push is not None:
            self.push.close()

    def _sync(self, trainer: Any) -> None:
        """Push once per step; every process waits until it is live."""
        step = trainer.state.global_step
        if self.push is None or step == self._pushed_at:
            return
        if trainer.accelerator.is_main_process:
            self.push(named_parameters(trainer.accelerator.unwrap_model(trainer.model)))
        trainer.accelerator.wait_for_everyone()
        self._pushed_at = step

    def _arguments(self, trainer: Any) -> dict[str, Any]:
        args = trainer.args
        wanted = {
            "max_tokens": args.max_completion_length,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k,
            "min_p": args.min_p,
            "repetition_penalty": args.repetition_penalty,
        }
        wanted = {name: value for name, value in wanted.items() if value is not None}
        return wanted | (args.generation_kwargs or {})


def named_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """(HF name, tensor) of a model. Raises ValueError for adapters, whose names the service does not know."""
    if hasattr(model, "merge_adapter"):
        raise ValueError("this rollout_func pushes whole models: merge the PEFT adapter, or use TRL's server mode")
    for name, parameter in model.named_parameters():
        yield name, parameter.data


def tokenized(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """Ids of the prompts as TRL itself makes them."""
    if isinstance(prompts[0], str):
        ids: list[list[int]] = trainer.processing_class(text=list(prompts))["input_ids"]
        return ids
    render: Callable[..., Any] = trainer.processing_class.apply_chat_template
    found: list[list[int]] = render(
        conversation=list(prompts),
        tools=getattr(trainer, "tools", None) or None,
        chat_template=getattr(trainer, "chat_template", None),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **(getattr(trainer, "chat_template_kwargs", None) or {}),
    )["input_ids"]
    return found
