"""Ray's own cluster of several nodes on one machine, in a process of its own; `Nodes` drives it from a test.

The process is told over standard input, a line at a time, and answers each with a line of JSON.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ANSWER_S, STOP_S = 240.0, 60.0
"""Ray starts a node in seconds, and on a machine with much else to do in minutes."""
PATIENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_worker_register_timeout_seconds": "240",
    "RAY_gcs_server_request_timeout_seconds": "120",
}
"""Ray's own settings give up after 30 to 60 s."""


class Nodes:
    """address: of the cluster. A node is called by Ray's id."""

    def __init__(self, log: Path, head_cpus: int) -> None:
        self._log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.ray.cluster", str(head_cpus)],
                cwd=ROOT,
                env=os.environ | PATIENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        try:
            self.address, self.head = self._answer("starts")
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
            self._reader.join(STOP_S)
            self._process.stdout.close()

    def _ask(self, *words: Any) -> Any:
        print(json.dumps(words), file=self._process.stdin, flush=True)
        return self._answer(str(words))

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.startswith('["answer"'):  # Ray prints too
                self._answers.put(line)
        self._answers.put("")

    def _answer(self, what: str) -> Any:
        began = time.monotonic()
        try:
            line = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            raise AssertionError(f"Ray's cluster: no answer to {what} in {ANSWER_S:g} s:\n{self._said()}") from None
        assert line, f"Ray's cluster: its process has ended ({what}):\n{self._said()}"
        print(f"Ray's cluster: {what}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        return json.loads(line)[1]

    def _said(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])


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
