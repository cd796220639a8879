"""What runs on the nodes: actors that keep a unit of processes going, as the supervisor does on the head.

They hold processes, not weights or requests: what these say to each other goes over sockets of their own. The actors'
methods are called by the head only. Importing this module does not load Ray.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fleet_ray.shipment import SHIPPED, Shipment, bracketed, erase, release, run_dir_on, sweep
from weight_manager.logs import setup
from weight_manager.whole_file import replace_file
from worker.background import kept
from worker.rendezvous import LISTEN
from worker.run_dir import RunDir
from worker.service import free_ports, replica_unit
from worker.supervisor import STDERR, to_stderr
from worker.unit import ProcessSpec, Unit, UnitSpec

log = logging.getLogger(__name__)

BOUND_S = 30.0
"""How long a store may take to listen."""
STOP_S = 6.0
"""Seconds for a store to end before it is killed: less than the head waits for its actor."""
POLL_S = 0.02


@dataclass(frozen=True)
class Place:
    """Where an actor runs. host: as other nodes reach it. sees_head: the head's files are there and can be read."""

    node: str
    host: str
    sees_head: bool = False


class NodeStore:
    """The weight store of one node, and its API."""

    def __init__(self, shipment: Shipment, log_level: str) -> None:
        setup("store actor", log_level, STDERR)
        if shipment.release != release():
            raise RuntimeError(f"this node has paddle-rollout {release()}, the head has {shipment.release}")
        place = _here()
        sweep(shipment)
        self._shipment = shipment
        self._host = place.host
        self._label = place.node[:8]
        self._run_dir = RunDir(run_dir_on(place.node, shipment.name))
        self._relay_port = 0  # chosen when the store is first started
        self._upstream = ""
        self._unit: Unit | None = None
        self._life: asyncio.Task[None] | None = None
        self._young: asyncio.Task[None] | None = None
        self._stopped = False
        self._api: Unit | None = None
        self._api_life: asyncio.Task[None] | None = None

    async def alive(self) -> None:
        """Answered once the actor is there."""

    async def start(self, upstream: str) -> tuple[str, str]:
        """Serve below `upstream`; returns the run directory and where further stores may join.

        Raises RuntimeError once told to stop, when the store has been given up, and when it does not listen yet: it is
        left to start then, and can be waited for again.
        """
        if self._stopped:
            raise RuntimeError("this store was told to stop")
        as_the_node()
        if self._young is None:
            work = partial(self._run_dir.stay_young, *SHIPPED)
            self._young = asyncio.create_task(kept("refreshing of the run directory", work))
        path = self._run_dir.path
        bound = path / "push_endpoint"
        running = self._life is not None and not self._life.done()
        if upstream != self._upstream or not running:
            bound.unlink(missing_ok=True)
            self._upstream = upstream
            if not running:
                self._relay_port = _free_port(self._host, self._relay_port)
            config = self._shipment.unpack(
                path, self._label, upstream=upstream, host=self._host, relay_port=self._relay_port
            )
            if self._unit is not None and running:
                self._unit.cycle()
                self._unit.kill()  # another store above: the next life takes over the arena, so nobody stops serving
            else:
                process = ProcessSpec("store", (sys.executable, "-m", "weight_manager", "--config", str(config)))
                spec = UnitSpec("store", "store", (process,), stop_s=STOP_S)
                self._unit = Unit(spec, self._run_dir.crashes, to_stderr)
                self._life = asyncio.create_task(self._unit.run())
        assert self._unit is not None
        assert self._life is not None
        await _listens("store", bound, self._life, self._unit)
        return str(path), f"tcp://{bracketed(self._host)}:{self._relay_port}"

    async def serve(self, head_url: str, port: int) -> str:
        """Answer HTTP beside the store; returns where, "" = not where strangers could. Raises as `start`."""
        if self._stopped:
            raise RuntimeError("this node's API was told to stop")
        if self._shipment.api["data_token"] is None and not ipaddress.ip_address(self._host).is_loopback:
            return ""
        bound = self._run_dir.path / "http_url"
        if self._api is None or self._api_life is None or self._api_life.done():
            bound.unlink(missing_ok=True)
            config = self._shipment.unpack_api(
                self._run_dir.path, self._label, head_url=head_url, host=self._host, port=port
            )
            argv = (sys.executable, "-m", "api", "--config", str(config))
            spec = UnitSpec("api", "api", (ProcessSpec("api", argv),), stop_s=STOP_S)
            self._api = Unit(spec, self._run_dir.crashes, to_stderr)
            self._api_life = asyncio.create_task(self._api.run())
        assert self._api_life is not None
        assert self._api is not None
        await _listens("API", bound, self._api_life, self._api)
        return bound.read_text().strip()

    async def api_ended(self) -> str:
        """Wait until the API has been given up or stopped; returns why."""
        return await _ended(self._api_life, self._api)

    async def tell(self, name: str, content: bytes) -> None:
        """A file of the head's run directory that the API of the node reads, replaced whole."""
        replace_file(self._run_dir.path / name, content)

    async def ended(self) -> str:
        """Wait until the store has been given up or stopped; returns why."""
        return await _ended(self._life, self._unit)

    async def stop(self) -> None:
        """Stop both and remove what they wrote, also what they could not: they may have been killed a moment ago."""
        self._stopped = True
        if self._young is not None:
            self._young.cancel()
        try:
            # At once: the head waits for both no longer than for one.
            await asyncio.gather(_stop(self._api_life, self._api), _stop(self._life, self._unit))
        finally:
            erase(self._shipment, self._run_dir.path)
            self._run_dir.close()


class ReplicaHost:
    """The ranks of one replica."""

    def __init__(self, replica: int, *, tp: int, threads: int, drain_s: float, log_level: str) -> None:
        setup(f"replica {replica} actor", log_level, STDERR)
        self._replica, self._tp, self._drain_s = replica, tp, drain_s
        self._env = {"OMP_NUM_THREADS": str(threads)}  # Ray sets one of its own
        self._endpoint = self._run_dir = ""
        self._unit: Unit | None = None
        self._life: asyncio.Task[None] | None = None

    async def where(self, head_config: str) -> Place:
        """Answered once the actor is there. head_config: path on the head, to see whether that is here."""
        place = _here()
        return Place(place.node, place.host, os.access(head_config, os.R_OK))

    async def start(self, run_dir: str, host: str, devices: Sequence[str]) -> str:
        """Serve beside the store of `run_dir`; returns the endpoint of rank 0.

        host: listen there, for an API on another host; "" = on a socket file. devices: GPUs of all ranks.
        """
        if self._unit is None or self._life is None or self._life.done():
            as_the_node()
            env = self._env | ({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {})
            self._endpoint = f"ipc://{run_dir}/replica-{self._replica}.sock"
            if host:
                self._endpoint = f"tcp://{bracketed(host)}:{free_ports(1, host)[0]}"
                env[LISTEN] = self._endpoint
            spec = replica_unit(Path(run_dir) / "config.json", self._replica, self._tp, self._drain_s, env)
            self._unit = Unit(spec, Path(run_dir) / "crashes", to_stderr)
            self._life = asyncio.create_task(self._unit.run())
        return self._endpoint

    async def ended(self) -> str:
        """Wait until the replica has been given up or stopped; returns why."""
        return await _ended(self._life, self._unit)

    async def stop(self) -> None:
        """Drain, then end."""
        await _stop(self._life, self._unit)


class Accelerators:
    """Holds the GPUs of a rank's bundle, and says which they are."""

    def ids(self) -> list[str]:
        """The GPUs, as CUDA_VISIBLE_DEVICES has them."""
        import ray  # noqa: PLC0415

        found: dict[str, list[str]] = ray.get_runtime_context().get_accelerator_ids()
        return found.get("GPU", [])


async def _ended(life: "asyncio.Task[None] | None", unit: Unit | None) -> str:
    assert life is not None
    assert unit is not None
    await asyncio.shield(life)
    return unit.why_gave_up or "stopped"


async def _stop(life: "asyncio.Task[None] | None", unit: Unit | None) -> None:
    if unit is not None and life is not None:
        unit.stop()
        await life
        await asyncio.to_thread(STDERR.flush)  # the actor is killed next


async def _listens(what: str, bound: Path, life: "asyncio.Task[None]", unit: Unit) -> None:
    """Return once the file says where. bound: the process writes it. Raises RuntimeError, see `NodeStore.start`."""
    try:
        async with asyncio.timeout(BOUND_S):
            while not _written(bound):
                if life.done():
                    raise RuntimeError(f"the {what} did not start: {await _ended(life, unit)}")
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise RuntimeError(f"the {what} has not listened within {BOUND_S:g} s; it goes on starting") from None


def _free_port(host: str, before: int) -> int:
    """The port that the store had before, for the sake of those that join there, unless somebody else has it by now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, before))
        except OSError:
            return free_ports(1, host)[0]
        return int(probe.getsockname()[1])


def _written(path: Path) -> bool:
    try:
        return path.read_text().endswith("\n")
    except OSError:
        return False


def as_the_node() -> None:
    """Give this process the priority of Ray's own on the node, which its workers are put 15 below: beside a trainer, or
    whatever else computes there, ranks were given a thirtieth of a processor. For all threads: Linux asks each. Where
    whoever started the node has chosen what its workers have (RAY_worker_niceness), they have that.
    """
    if "RAY_worker_niceness" in os.environ:
        return
    wanted = os.getpriority(os.PRIO_PROCESS, os.getppid())
    try:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                if os.getpriority(os.PRIO_PROCESS, int(thread)) > wanted:
                    os.setpriority(os.PRIO_PROCESS, int(thread), wanted)
    except PermissionError:
        log.warning(
            "whatever else computes on this node goes first (niceness %d): start Ray there with RAY_worker_niceness=0",
            os.getpriority(os.PRIO_PROCESS, 0),
        )


def _here() -> Place:
    import ray  # noqa: PLC0415

    context: Any = ray.get_runtime_context()
    return Place(context.get_node_id(), str(ray.util.get_node_ip_address()))
