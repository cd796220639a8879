"""A trainer for each of many tasks, one after the other: it pushes an adapter of its own some times, unloads it and is
gone. No name comes twice, as over weeks.

One JSON line on stdout for each task: what went wrong with each of its pushes, by name, and in words.
"""

import argparse
import itertools
import time
from functools import partial

from rollout_client.publisher import WeightPublisher
from tests.chaos.trainer import PUSH_S, ended, tell, weights_of
from tests.reference.adapters import adapter, adapter_config

VERSIONS = 3
RANK = 4


def main() -> None:
    """Push until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--every-s", type=float, default=2.0)
    options = parser.parse_args()
    base = weights_of(options.seed, 0)
    for number in itertools.count():
        began, name = time.monotonic(), f"task-{number}"
        with WeightPublisher(options.endpoint, run_id=name, progress=False) as publisher:
            ends = []
            for version in range(1, VERSIONS + 1):
                tensors = adapter(base, VERSIONS * number + version, RANK)
                work = partial(publisher.push_adapter, name, tensors, adapter_config(RANK), version, timeout_s=PUSH_S)
                ends.append(ended(work))
            ends.append(ended(partial(publisher.unload_adapter, name, timeout_s=PUSH_S)))
        tell(task=name, errors=[end.error for end in ends], why=[end.why for end in ends if end.error])
        time.sleep(max(0.0, began + options.every_s - time.monotonic()))


if __name__ == "__main__":
    main()
