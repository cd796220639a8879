"""Reports and counters of this package as one flat dict of floats, as wandb.log and tensorboard want it."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import msgspec


def flat(counters: Any, prefix: str = "rollout/") -> dict[str, float]:
    """Every number in `counters`, by its path: {"seconds": {"move": 0.2}} -> {"rollout/seconds/move": 0.2}.

    counters: a PushReport, Weights, PauseState, Usage, Pusher.counters, or any mapping, dataclass or message
    of them. Lists become <name>/<index>. Booleans become 0 and 1; text and what is not there is left out.
    """
    return {prefix + path: value for path, value in _numbers(_plain(counters), "")}


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool | int | float):
        yield path, float(value)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(_plain(inner), f"{path}/{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _numbers(_plain(inner), f"{path}/{i}" if path else str(i))


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
