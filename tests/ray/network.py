"""Hosts on one machine: namespaces on a bridge, each with an address, processes, and a way to die. Needs root."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.ray.cluster import PATIENT

SYSTEM_S, GONE_S, JOIN_S, TRIES = 20.0, 20.0, 90.0, 4
IMPATIENT = PATIENT | {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}
"""Ray's own settings call a node dead after most of a minute. It may take its time to begin."""


def run(*command: str) -> str:
    """A short system command. Raises CalledProcessError with what it said."""
    return subprocess.run(command, check=True, timeout=SYSTEM_S, capture_output=True, text=True).stdout


class Network:
    """10.79.0.0/24; the machine itself is .254 there. `close` removes everything."""

    def __init__(self) -> None:
        self._bridge = f"pr{os.getpid()}"
        self._addresses: dict[str, str] = {}
        run("ip", "link", "add", self._bridge, "type", "bridge")
        run("ip", "addr", "add", "10.79.0.254/24", "dev", self._bridge)
        run("ip", "link", "set", self._bridge, "up")

    def add(self, host: str) -> str:
        """A host; returns its address."""
        number = len(self._addresses) + 1
        outside, space, address = f"{self._bridge}v{number}", self.space(host), f"10.79.0.{number}"
        self._addresses[host] = address
        run("ip", "netns", "add", space)
        run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        run("ip", "link", "set", outside, "master", self._bridge, "up")
        run("ip", "-n", space, "link", "set", "lo", "up")
        run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        run("ip", "-n", space, "link", "set", "eth0", "up")
        return address

    def space(self, host: str) -> str:
        """Its namespace's name."""
        return f"{self._bridge}-{host}"

    def on(self, host: str, *command: str) -> list[str]:
        """A command line that runs there."""
        return ["ip", "netns", "exec", self.space(host), *command]

    def sent_bytes(self, host: str) -> int:
        """That have left it."""
        return int(run(*self.on(host, "cat", "/sys/class/net/eth0/statistics/tx_bytes")))

    def unplug(self, host: str) -> None:
        """Power loss: the cable first, so that no dying process can say goodbye."""
        run("ip", "-n", self.space(host), "link", "set", "eth0", "down")
        self.end_processes(host)

    def end_processes(self, host: str) -> None:
        """All of them, at once."""
        end = time.monotonic() + GONE_S
        while pids := run("ip", "netns", "pids", self.space(host)).split():
            assert time.monotonic() < end, f"{host}: processes {pids} do not end"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)

    def close(self) -> None:
        for host in self._addresses:
            with contextlib.suppress(subprocess.CalledProcessError):
                self.end_processes(host)
                run("ip", "netns", "del", self.space(host))
        run("ip", "link", "del", self._bridge)


class RayHosts:
    """A Ray cluster on a network: a node on each host."""

    def __init__(self, network: Network, directory: Path) -> None:
        self._network = network
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self.address = ""

    def start(self, host: str, ray: Path, cpus: int = 1) -> None:
        """A node on a new host; the first one is the head. Returns when it has joined. A raylet ends itself where its
        agents take over 15 s to say which ports they have, for which there is no setting, and `ray start` waits on for
        it: then it is begun again.
        """
        address = self._network.add(host)
        where = ["--address", self.address] if self.address else ["--head", "--port=6379", "--include-dashboard=false"]
        self.address = self.address or f"{address}:6379"
        command = [str(ray), "start", *where, f"--node-ip-address={address}", f"--num-cpus={cpus}"]
        log = self._directory / f"ray-{host}.log"
        for number in range(1, TRIES + 1):
            began = time.monotonic()
            if self._joins(host, command, log):
                print(
                    f"Ray's cluster: {host} has joined: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True
                )
                return
            print(f"Ray's cluster: {host} has not joined, try {number} of {TRIES}", file=sys.stderr, flush=True)
            self._network.end_processes(host)
        raise AssertionError(f"{host} has not joined:\n{log.read_text()}")

    def _joins(self, host: str, command: list[str], log: Path) -> bool:
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._network.on(host, *command, "--disable-usage-stats", "--block"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | IMPATIENT,
            )
        self._processes.append(process)
        end = time.monotonic() + JOIN_S
        while time.monotonic() < end and process.poll() is None:
            if b"Ray runtime started" in log.read_bytes():
                return True
            time.sleep(0.05)
        return False

    def reap(self) -> None:
        """After the network has ended them."""
        for process in self._processes:
            process.wait(GONE_S)
