"""Stores of several hosts, as processes on loopback: each with a run directory, an arena and ports of its own."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollout_client.publisher import WeightPublisher
from tests.faults.replica import Replica
from tests.faults.small_model import ADAPTER_CONFIG, Weights, adapter, adapter_digest, digest_of
from tests.faults.store_process import Store
from tests.faults.waiting import until
from weight_manager import messages
from weight_manager.arena import ArenaReader

LEASE_S = 2.0
TOKEN = "a token of the whole fleet"


class Host:
    """A store and one scripted replica, which serves only what its lease allows."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        above: "Host | None",
        *,
        replica: type[Replica] | None = Replica,
        **config: Any,
    ) -> None:
        directory.mkdir()
        part: dict[str, Any] = {
            "token": TOKEN,
            "relay_endpoint": "tcp://127.0.0.1:*",
            "relay_lease_s": LEASE_S,
            "relay_patience_s": 1.0,
            "push_endpoint": "tcp://127.0.0.1:*",
            "rollback_s": 0.5,
            "lease_s": 10.0,
        }
        if above is not None:
            part["upstream"] = above.relay_endpoint
        self.store = Store(directory / "run", model, directory / "arena", **(part | config))
        self.replica = replica(self.store) if replica else None
        bound = self.store.run_dir / "relay_endpoint"
        until(lambda: bound.exists() and bound.read_text().endswith("\n"))

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
        computed = served if self.replica is None else self.replica.served()
        assert computed == served, f"the store says {served}, its replica computes with {computed}"
        return served

    def may_serve(self) -> bool:
        """What a rank goes by, also when the store is stopped or dead."""
        (path,) = (path for path in self.store.arena_dir.glob("*.arena") if "-adapters-" not in path.name)
        with ArenaReader(path) as reader:
            return not reader.expired()

    def adapters(self) -> dict[str, tuple[int, str]]:
        """Name -> (version, digest of the bytes), of the store and of what its replica computes with."""
        said = {
            a["name"]: (a["version"], a["digest"]) for a in self.store.status().adapters if a["version"] is not None
        }
        if self.replica is not None:
            computed = {name: self.replica.adapter_served(name) for name in list(self.replica.adapters)}
            assert computed == said, f"the store says {said}, its replica computes with {computed}"
        return said

    def restart(self, **changes: Any) -> None:
        """After `kill`, as the supervisor would, on the same ports."""
        config = json.loads(self.store.config_file.read_text())
        config["store"] |= {"relay_endpoint": self.relay_endpoint, "push_endpoint": self.store.endpoint} | changes
        self.store.config_file.write_text(json.dumps(config))
        self.store.start()

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
        self._pool = ThreadPoolExecutor(2)

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
        timeout_s = fields.pop("timeout_s", 15)
        with self.publisher(transport=fields.pop("transport", "zmq")) as publisher:
            return publisher.push(tensors, version, timeout_s=timeout_s, **fields)

    def publisher(self, **options: Any) -> WeightPublisher:
        """A trainer's, of the host that takes the pushes."""
        options = {"token": TOKEN, "transport": "zmq", "progress": False} | options
        return WeightPublisher(next(iter(self.hosts.values())).store.endpoint, run_id="run", **options)

    def push_adapter(self, seed: int, version: int, name: str = "policy-a", **fields: Any) -> Any:
        """A version of an adapter."""
        timeout_s = fields.pop("timeout_s", 15)
        with self.publisher(transport=fields.pop("transport", "zmq")) as publisher:
            return publisher.push_adapter(name, adapter(seed), ADAPTER_CONFIG, version, timeout_s=timeout_s, **fields)

    def start_adapter(self, seed: int, version: int, name: str = "policy-a", **fields: Any) -> "Future[Any]":
        """In a thread."""
        return self._pool.submit(self.push_adapter, seed, version, name, **fields)

    def serve_adapters(self, expected: dict[str, tuple[int, int]], *names: str, seconds: float = 5.0) -> None:
        """These hosts (all) are ready and have just these adapters, within a time: name -> (seed, version)."""
        wanted = {name: (version, adapter_digest(adapter(seed))) for name, (seed, version) in expected.items()}
        for name in names or self.hosts:
            host = self.hosts[name]
            until(lambda host=host: host.ready() and host.replica.adapters.keys() == wanted.keys(), seconds)
            until(
                lambda host=host: (
                    {a["name"]: a["version"] for a in host.store.status().adapters}
                    == {name: version for name, (version, _) in wanted.items()}
                ),
                seconds,
            )
            assert host.adapters() == wanted, name

    def start_push(self, tensors: Weights, version: int, **fields: Any) -> "Future[Any]":
        """In a thread."""
        return self._pool.submit(self.push, tensors, version, **fields)

    def serve(self, version: int, tensors: Weights, *names: str, seconds: float = 2.0) -> None:
        """These hosts (all) serve this version and are ready, within a time."""
        expected = version, digest_of(tensors)
        for name in names or self.hosts:
            host = self.hosts[name]
            until(lambda host=host: host.ready() and host.store.status().live.version == version, seconds)
            until(lambda host=host: host.replica is None or host.replica.served()[0] == version, seconds)
            assert host.serving() == expected, name

    def close(self) -> None:
        for host in reversed(self.hosts.values()):
            host.close()
        self._pool.shutdown()


class Gated(Replica):
    """Answers to `Flip`, or what `at` says, only once `gate` is open."""

    at: type = messages.Flip

    def __init__(self, *args: Any, **plan: str) -> None:
        self.gate = threading.Event()
        super().__init__(*args, **plan)

    def _answer(self, message: Any, what: str) -> Any:
        if isinstance(message, self.at):
            self.gate.wait(15)
        return super()._answer(message, what)


class GatedVote(Gated):
    """Votes only once `gate` is open."""

    at = messages.Prepare


class Proxy:
    """A network between a store and the one above: `rate` bytes a second, nothing at all while `cut`.

    It has the ports of the store above, at an address of its own: its relay endpoint, and the port of its data
    connections unless that is None.
    """

    HOST = "127.0.0.2"

    def __init__(self, relay_endpoint: str, data_port: int | None) -> None:
        relay_port = int(relay_endpoint.rpartition(":")[2])
        self.endpoint = f"tcp://{self.HOST}:{relay_port}"
        self.rate, self.cut = 1 << 40, False
        self.data: list[socket.socket] = []
        self._control: list[socket.socket] = []
        self._listen(relay_port, self._control)
        if data_port is not None:
            self._listen(data_port, self.data)

    def close(self) -> None:
        self._end(self._control)
        self.break_data()

    def break_data(self) -> None:
        """Every data connection ends, and nobody can connect any more."""
        self._end(self.data)

    def _end(self, sockets: list[socket.socket]) -> None:
        for s in sockets:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()

    def _listen(self, port: int, sockets: list[socket.socket]) -> None:
        listener = socket.create_server((self.HOST, port))
        sockets.append(listener)
        threading.Thread(target=self._accept, args=(listener, port, sockets), daemon=True).start()

    def _accept(self, listener: socket.socket, port: int, sockets: list[socket.socket]) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", port))
                except ConnectionError:  # the store above is away
                    near.close()
                    continue
                sockets += [near, far]
                for a, b in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(a, b), daemon=True).start()

    def _forward(self, a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(16 << 10):
                while self.cut:
                    time.sleep(0.02)
                time.sleep(len(data) / self.rate)
                b.sendall(data)
        for s in (a, b):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
