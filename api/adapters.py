"""LoRA adapters as the API shows them: what the store says of each, and which version each replica serves."""

from api.schemas.adapters import Adapter
from api.weights import Weights


def described(weights: Weights) -> list[Adapter]:
    """The adapters by name, those that are pushed for the first time included."""
    status = weights.status
    if status is None:
        return []
    serving = {number: replica.get("adapters", {}).get("live", {}) for number, replica in status.replicas.items()}
    return [
        Adapter(**entry, replicas={number: live.get(entry["name"]) for number, live in serving.items()})
        for entry in status.adapters
    ]
