"""A trainer of a chaos run, a process of its own so that it can be killed: a new version every second, of the model or
of an adapter, which it also unloads at times.

One JSON line on stdout when a push or an unload begins, one when it ended. The weights of a version follow from the
seed.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_client.errors import PushError, RolloutError
from rollout_client.publisher import WeightPublisher
from tests.reference.adapters import adapter, adapter_config, merged
from tests.reference.checkpoint import CONFIG, random_weights

RUN_ID = "chaos"
PUSH_S = 20.0
POLICIES = ("keep", "recompute", "wait", "abort")
ADAPTERS = ("policy-a", "policy-b")
_UNLOADED = 0.2
"""Share of an adapter's versions before which it is unloaded."""


def weights_of(seed: int, version: int) -> dict[str, npt.NDArray[np.float32]]:
    """What version `version` of the run with this seed consists of."""
    return random_weights(CONFIG, seed * 1_000_003 + version)


def rank_of(version: int) -> int:
    """Of an adapter's version: one of another rank takes the place of the line before it."""
    return 8 if version % 5 == 0 else 4


def adapter_of(seed: int, name: str, version: int) -> dict[str, npt.NDArray[np.float32]]:
    """What this version of an adapter consists of, as PEFT names it."""
    number = ((seed * 1_000_003 + version) << 1) + ADAPTERS.index(name)
    return adapter(weights_of(seed, 0), number, rank_of(version))


def adapted_weights(seed: int, version: int, name: str, adapter_version: int) -> dict[str, npt.NDArray[np.float32]]:
    """Weights that compute what a version of the model with one of the adapter does."""
    return merged(weights_of(seed, version), adapter_of(seed, name, adapter_version))


def push(publisher: WeightPublisher, seed: int, name: str, version: int, policy: Any) -> bool:
    """Of the adapter of this name; "" = of the model. Whether it was live before the arena had it. Raises
    RolloutError.
    """
    if name:
        config = adapter_config(rank_of(version))
        publisher.push_adapter(
            name, adapter_of(seed, name, version), config, version, in_flight=policy, timeout_s=PUSH_S
        )
        return False
    report = publisher.push(weights_of(seed, version), version, in_flight=policy, timeout_s=PUSH_S)
    return report.live_s < report.seconds["total"]


def tell(**what: object) -> None:
    """To whoever reads our stdout."""
    print(json.dumps(what), flush=True)


class Ended(NamedTuple):
    """How a piece of work ended. error: what went wrong with it, by name, "" = nothing; why: in words."""

    error: str
    why: str
    seconds: float
    result: Any


def ended(work: Callable[[], object]) -> Ended:
    """Do it."""
    began, error, why, result = time.monotonic(), "", "", None
    try:
        result = work()
    except RolloutError as failure:
        error, why = failure.code if isinstance(failure, PushError) else type(failure).__name__, str(failure)[:300]
    return Ended(error, why, time.monotonic() - began, result)


def main() -> None:
    """Push until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--every-s", type=float, default=1.0)
    parser.add_argument("--adapter", choices=("", *ADAPTERS), default="")
    parser.add_argument("--on-device", action="store_true", help="where its tensors lie, and ranks copy from")
    options = parser.parse_args()
    way: dict[str, Any] = {}
    if options.on_device:
        from tests.chaos.devices import lie_on_device

        lie_on_device()
        way = {"transport": "cuda_ipc", "durability": "device"}
    version, name = options.first, options.adapter
    with WeightPublisher(options.endpoint, run_id=RUN_ID, progress=False, **way) as publisher:
        while True:
            rng = random.Random(f"{options.seed} {name} {version}")
            policy = rng.choice((*POLICIES, "finish") if name else POLICIES)
            if name and rng.random() < _UNLOADED:
                tell(unload=version)
                end = ended(lambda: publisher.unload_adapter(name, timeout_s=PUSH_S))
                tell(unloaded=version, seconds=end.seconds, error=end.error, why=end.why)
            began = time.monotonic()
            tell(begin=version, policy=policy)
            end = ended(partial(push, publisher, options.seed, name, version, policy))
            tell(end=version, seconds=end.seconds, error=end.error, why=end.why, ahead=bool(end.result))
            version += 1
            time.sleep(max(0.0, began + options.every_s - time.monotonic()))


if __name__ == "__main__":
    main()
