"""A trainer on a host of its own: two checkpoints take turns; one line of JSON per push on standard output.

    python -m tests.ray.trainer ENDPOINT CONFIG_JSON PUSHES GAP_S

After PUSHES of them it asks before each whether another one is wanted: by a line of standard input, `MORE`. A push
that is refused, or cut off by a death, is made again; `failed` says why. Times are time.monotonic(), which all
processes of a machine share. sent: bytes that left this host in the attempt that went through.
"""

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from rollout_client.errors import PushError
from rollout_client.publisher import WeightPublisher
from tests.ray.fleet import TOKEN
from tests.reference.checkpoint import random_weights

SEEDS = (201, 202)
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
PATIENCE_S, AGAIN_S = 60.0, 0.5
MORE, ENOUGH = "more\n", "enough\n"


def main() -> None:
    endpoint, config, pushes, gap_s = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    sets = [random_weights(config, seed) for seed in SEEDS]
    nbytes = sum(tensor.nbytes for tensor in sets[0].values())
    with WeightPublisher(endpoint, run_id="fleet", token=TOKEN, transport="zmq", progress=False) as publisher:
        for version in itertools.count():
            print(json.dumps(push(publisher, sets[version % 2], version) | {"bytes": nbytes}), flush=True)
            if version >= pushes and sys.stdin.readline() != MORE:
                return
            time.sleep(gap_s)


def push(publisher: WeightPublisher, weights: Any, version: int) -> dict[str, Any]:
    began, why = time.monotonic(), []
    while True:
        sent = int(SENT.read_text())
        try:
            report = publisher.push(weights, version, timeout_s=PATIENCE_S)
        except PushError as error:
            assert len(why) < 20, why
            why.append(str(error)[:200])
            time.sleep(AGAIN_S)
            continue
        told = time.monotonic()
        return {
            "version": version,
            "began": began,
            "told": told,
            "sent": int(SENT.read_text()) - sent,
            "replicas": report.replicas,
            "failed": why,
        }


if __name__ == "__main__":
    main()
