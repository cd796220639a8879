"""A fleet on a Ray cluster of three nodes: cold starts, and a hundred pushes under load over a node's power loss.

    sudo .venv/bin/python -m benchmarks.ray_fleet [--pushes 100] [--cold 3]

Nodes are network namespaces of this machine (tests/ray/network.py), three replicas of a 1.3M-parameter Llama in Paddle.
tests/ray/scenario.py says what is done and how it is judged. Writes results/ray_fleet.json; 1 if a bar is missed.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.ray import scenario
from tests.ray.network import Network, RayHosts
from tests.reference.checkpoint import Checkpoint

RESULTS = Path(__file__).parent / "results" / "ray_fleet.json"
COLD_S, COPIES = 15.0, 1.05


def cold_starts(rounds: int) -> list[dict[str, float]]:
    """`serve --ray` on a cluster that runs: seconds until the first and until all three replicas are ready."""
    directory = Path(tempfile.mkdtemp(prefix="ray-cold-"))
    model = Checkpoint.random(directory / "model", seed=1, **scenario.SIZES)
    network = Network()
    hosts = RayHosts(network, directory)
    found = []
    try:
        for host in ("head", "one", "two"):
            hosts.start(host, Path(sys.executable).with_name("ray"))
        time.sleep(5)  # Ray starts idle workers ahead
        for _ in range(rounds):
            service = scenario.NetworkService(network, hosts, model.directory, "--replicas", "3")
            try:
                began = time.monotonic()
                service.start()
                first = time.monotonic() - began
                service.wait_ready(0, 1, 2)
                found.append({"first_s": first, "three_s": time.monotonic() - began, "load": os.getloadavg()[0]})
                print(json.dumps(found[-1]), flush=True)
                service.stop()
            finally:
                service.close()
    finally:
        network.close()
        hosts.reap()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pushes", type=int, default=100)
    parser.add_argument("--cold", type=int, default=3)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was made is removed on the way out
    cold = cold_starts(options.cold) if options.cold else []
    result: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "cold": cold}
    load = os.getloadavg()[0]
    facts = scenario.run(options.pushes, kill_at=options.pushes // 3, add_at=2 * options.pushes // 3, gap_s=0.2)
    result |= {"load_before": load, "load_after": os.getloadavg()[0], "scenario": facts}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    stale = facts["stale_after_told"] + facts["stale_after_seen"]
    late = any(one["first_s"] > COLD_S for one in result["cold"])
    return int(bool(stale) or facts["copies_per_push_max"] > COPIES or late)


if __name__ == "__main__":
    sys.exit(main())
