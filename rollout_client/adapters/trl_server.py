"""TRL's server mode (`GRPOConfig(use_vllm=True, vllm_mode="server")`) without vLLM and without NCCL.

    install("tcp://127.0.0.1:5600", run_id="run-7")    # before the trainer is made
    trainer = GRPOTrainer(args=GRPOConfig(use_vllm=True, vllm_mode="server", vllm_server_base_url=url), ...)

TRL's own client speaks HTTP to the service as it is. What it needs NCCL for is replaced: `init_communicator`
and `update_named_params`, which push over ZMQ or shared memory from any device. TRL gathers FSDP and ZeRO
parameters and merges PEFT adapters before it hands tensors over, so those work too.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout_client.adapters.push import Pusher
from rollout_client.curve import TrainerKeys
from rollout_client.protocol import InFlight
from rollout_client.publisher import DEFAULT_ENDPOINT

Metadata = list[tuple[str, str, list[int]]]

USERS = ("trl.generation.vllm_client", "trl.generation.vllm_generation")
"""Modules of TRL that ask whether vLLM is installed before they would use a client of it."""


def client_class(push: Pusher) -> type[Any]:
    """A subclass of TRL's VLLMClient that pushes its weights with `push`. Raises ImportError without TRL."""
    base: Any = importlib.import_module(USERS[0]).VLLMClient

    class PaddleRolloutClient(base):  # type: ignore[misc]
        """TRL's client; weights go to the store."""

        def init_communicator(self, device: Any = 0) -> None:
            """Reach the store. device: any; tensors are read where they are."""
            push.connect()
            self.communicator: Pusher | None = push

        def update_named_params(self, metadata: Metadata, named_params: Iterator[tuple[str, Any]]) -> None:
            """Make these tensors live on every replica, or change nothing and raise PushError."""
            push(named_params)

        def close_communicator(self) -> None:
            """Disconnect. Idempotent."""
            push.close()
            self.communicator = None

    return PaddleRolloutClient


def install(
    endpoint: str = DEFAULT_ENDPOINT,
    *,
    run_id: str,
    in_flight: InFlight = "recompute",
    push_token: str = "",
    push_keys: str | Path | TrainerKeys | None = None,
) -> Pusher:
    """Make TRL's server mode use the service, for this process. Returns the pusher: version and counters.

    push_token, push_keys: of the service's store, as WeightPublisher has them without `push_`.
    Changes two of TRL's module globals: which client its server mode makes, and that it need not have vLLM.
    """
    push = Pusher(endpoint, run_id=run_id, in_flight=in_flight, token=push_token, keys=push_keys)
    made = client_class(push)
    client_module, generation_module = (importlib.import_module(name) for name in USERS)
    for module in (client_module, generation_module):
        module.is_vllm_available = _no_need_of_vllm  # type: ignore[attr-defined]
    generation_module.VLLMClient = made  # type: ignore[attr-defined]
    client_module._HAS_RESET_PREFIX_CACHE_SUCCESS = True  # type: ignore[attr-defined]
    return push


def _no_need_of_vllm(min_version: str | None = None) -> bool:
    """TRL asks before it makes a client."""
    return True
