"""Ray's own cluster of several nodes on one machine, in a process of its own; `Nodes` drives it from a test.

The process is told over standard input, a line at a time, and answers each with a line of JSON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_S, STOP_S = 120.0, 60.0


class Nodes:
    """address: of the cluster. A node is called by Ray's id."""

    def __init__(self, log: Path, head_cpus: int) -> None:
        environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "120"}
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.ray.cluster", str(head_cpus)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        try:
            self.address, self.head = self._answer()
        except BaseException:
            self.close()
            raise

    def add(self, cpus: int = 1, gpus: int = 0) -> str:
        """gpus: as many as Ray is told of; there need not be one."""
        return str(self._ask("add", cpus, gpus))

    def kill(self, node: str) -> None:
        """Without a chance to say anything."""
        self._ask("kill", node)

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            self._process.stdout.close()

    def _ask(self, *words: Any) -> Any:
        print(json.dumps(words), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        line = self._process.stdout.readline()
        while line and not line.startswith('["answer"'):
            line = self._process.stdout.readline()  # Ray prints too
        assert line, "the cluster's process has ended; see its log"
        return json.loads(line)[1]


def main() -> None:
    from ray.cluster_utils import Cluster

    def answer(what: Any) -> None:
        print(json.dumps(["answer", what]), flush=True)

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": int(sys.argv[1]), "include_dashboard": False}, connect=False
    )
    try:
        answer([cluster.address, cluster.head_node.node_id])
        nodes = {}
        for line in sys.stdin:
            match json.loads(line):
                case ["add", cpus, gpus]:
                    node = cluster.add_node(num_cpus=cpus, num_gpus=gpus)
                    nodes[node.node_id] = node
                    answer(node.node_id)
                case ["kill", name]:
                    cluster.remove_node(nodes.pop(name), allow_graceful=False)
                    answer(None)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
