"""What a trainer imports: WeightPublisher for weights, RolloutClient for everything else. No Paddle, no torch.

Names are fetched when they are first used, so that a trainer pays for what it touches.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_client.errors import PushError, RolloutError, StoreUnavailable
    from rollout_client.http import AsyncRolloutClient, RolloutClient
    from rollout_client.publisher import WeightPublisher
    from rollout_client.push_report import PushReport
    from rollout_client.slices import local_slices
    from rollout_client.tensors import Slice

__all__ = [
    "AsyncRolloutClient",
    "PushError",
    "PushReport",
    "RolloutClient",
    "RolloutError",
    "Slice",
    "StoreUnavailable",
    "WeightPublisher",
    "local_slices",
]

_HOMES = {
    "AsyncRolloutClient": "http",
    "PushError": "errors",
    "PushReport": "push_report",
    "RolloutClient": "http",
    "RolloutError": "errors",
    "Slice": "tensors",
    "StoreUnavailable": "errors",
    "WeightPublisher": "publisher",
    "local_slices": "slices",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
