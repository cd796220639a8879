"""The trainer of a chaos run, a process of its own so that it can be killed: a new version every second.

One JSON line on stdout when a push begins, one when it ended. The weights of a version follow from the seed.
"""

import argparse
import json
import random
import time

import numpy as np
import numpy.typing as npt

from rollout_client.errors import PushError, RolloutError
from rollout_client.publisher import WeightPublisher
from tests.reference.checkpoint import CONFIG, random_weights

RUN_ID = "chaos"
PUSH_S = 20.0
POLICIES = ("keep", "recompute", "wait", "abort")


def weights_of(seed: int, version: int) -> dict[str, npt.NDArray[np.float32]]:
    """What version `version` of the run with this seed consists of."""
    return random_weights(CONFIG, seed * 1_000_003 + version)


def tell(**what: object) -> None:
    """To whoever reads our stdout."""
    print(json.dumps(what), flush=True)


def main() -> None:
    """Push until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--every-s", type=float, default=1.0)
    options = parser.parse_args()
    version = options.first
    with WeightPublisher(options.endpoint, run_id=RUN_ID, progress=False) as publisher:
        while True:
            policy = random.Random(f"{options.seed} {version}").choice(POLICIES)
            weights = weights_of(options.seed, version)
            began = time.monotonic()
            tell(begin=version, policy=policy)
            error = ""
            try:
                publisher.push(weights, version, in_flight=policy, timeout_s=PUSH_S)
            except RolloutError as failure:
                error = failure.code if isinstance(failure, PushError) else type(failure).__name__
            tell(end=version, seconds=time.monotonic() - began, error=error)
            version += 1
            time.sleep(max(0.0, began + options.every_s - time.monotonic()))


if __name__ == "__main__":
    main()
