"""Making a checkpoint directory live, as the dialects ask for it: the version is a name, not always a number."""

from typing import Any

from api.versions import VersionNames
from api.weights import Weights
from rollout_client.protocol import InFlight


async def load(
    weights: Weights,
    versions: VersionNames,
    path: str,
    *,
    name: str | None = None,
    in_flight: InFlight = "keep",
    deadline_s: float = 180.0,
) -> dict[str, Any]:
    """Load; returns the store's report. A name that is a number is the version (and refused unless it rises),
    any other is what the next version is called from then on. Raises what the store refuses it for.
    """
    number = int(name) if name is not None and name.isdecimal() and len(name) < 19 else None
    report = await weights.load(path, version=number, in_flight=in_flight, deadline_s=deadline_s)
    await weights.wait_for_version(report.get("version", number or 0), timeout_s=5.0)
    if name is not None and number is None:
        await versions.give(name)
    return report
