"""Stores of several hosts, as processes on loopback: each with a run directory, an arena and ports of its own."""

import os
import signal
from pathlib import Path
from typing import Any

from rollout_client.publisher import WeightPublisher
from tests.faults.replica import Replica
from tests.faults.small_model import Weights, digest_of
from tests.faults.store_process import Store
from tests.faults.waiting import until

LEASE_S = 1.5
TOKEN = "a token of the whole fleet"


class Host:
    """A store and one scripted replica, which serves only what its lease allows."""

    def __init__(
        self, directory: Path, model: Path, above: "Host | None", *, replica: bool = True, **config: Any
    ) -> None:
        directory.mkdir()
        part: dict[str, Any] = {
            "token": TOKEN,
            "relay_endpoint": "tcp://127.0.0.1:*",
            "relay_lease_s": LEASE_S,
            "relay_patience_s": 1.0,
            "push_endpoint": "tcp://127.0.0.1:*",
            "rollback_s": 0.5,
        }
        if above is not None:
            part["upstream"] = above.relay_endpoint
        self.store = Store(directory / "run", model, directory / "arena", **(part | config))
        self.replica = Replica(self.store) if replica else None
        bound = self.store.run_dir / "relay_endpoint"
        until(lambda: bound.exists() and bound.read_text().endswith("\n"), 10)

    @property
    def relay_endpoint(self) -> str:
        return (self.store.run_dir / "relay_endpoint").read_text().strip()

    @property
    def pid(self) -> int:
        return self.store.process.pid

    def relay(self) -> dict[str, Any]:
        relay = self.store.status().relay
        assert relay is not None
        return relay

    def fenced(self) -> bool:
        return bool(self.relay()["above"]["fenced"])

    def ready(self) -> bool:
        """What /ready goes by: not fenced, and the replica holds what is live."""
        status = self.store.status()
        assert status.relay is not None
        above = status.relay["above"]
        held = self.replica is None or any(r["ready"] for r in status.replicas.values())
        return status.live is not None and held and not (above and above["fenced"])

    def serving(self) -> tuple[int | None, str]:
        """What the store says and what its replica computes with, which must be the same."""
        served = self.store.serving()
        assert self.replica is None or self.replica.served() == served
        return served

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.store.end(signal.SIGKILL)

    def close(self) -> None:
        if self.replica is not None:
            self.replica.close()
        if self.store.process.poll() is None:
            self.signal(signal.SIGCONT)
        self.store.close()


class RelayFleet:
    """Hosts by name; the first one takes the pushes."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.directory, self.model = directory, model
        self.hosts: dict[str, Host] = {}

    def add(self, name: str, above: str | None = None, **config: Any) -> Host:
        host = Host(self.directory / name, self.model, self.hosts[above] if above else None, **config)
        self.hosts[name] = host
        return host

    def chain(self, length: int, **config: Any) -> "list[Host]":
        names = "abcdefgh"[:length]
        for i, name in enumerate(names):
            self.add(name, names[i - 1] if i else None, **config)
        self.wait_ready()
        return list(self.hosts.values())

    def wait_ready(self, *names: str, seconds: float = 10.0) -> None:
        for name in names or self.hosts:
            until(self.hosts[name].ready, seconds)

    def push(self, tensors: Weights, version: int, **fields: Any) -> Any:
        head = next(iter(self.hosts.values()))
        transport = fields.pop("transport", "zmq")
        timeout_s = fields.pop("timeout_s", 15)
        options = {"token": TOKEN, "transport": transport, "progress": False}
        with WeightPublisher(head.store.endpoint, run_id="run", **options) as publisher:
            return publisher.push(tensors, version, timeout_s=timeout_s, **fields)

    def all_serve(self, version: int, tensors: Weights) -> None:
        expected = version, digest_of(tensors)
        for name, host in self.hosts.items():
            assert host.serving() == expected, name

    def close(self) -> None:
        for host in reversed(self.hosts.values()):
            host.close()
