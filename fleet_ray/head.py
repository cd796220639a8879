"""The fleet's process on the head: Ray's driver. It keeps as many replicas as are wanted, and tells the API of them."""

import asyncio
import contextlib
import json
import logging
import signal
from pathlib import Path
from typing import Any

import ray
import zmq
import zmq.asyncio

from fleet_ray import messages
from fleet_ray.actors import Place
from fleet_ray.apis import Apis
from fleet_ray.config import FleetConfig
from fleet_ray.errors import short
from fleet_ray.kept_file import KeptFile
from fleet_ray.messages import Failed, FleetState, GetFleet, Reply, Request, Scale
from fleet_ray.replicas import KeptReplica
from fleet_ray.shipment import KEYS, bracketed, pack
from fleet_ray.stores import Stores
from weight_manager.errors import UNREADABLE
from worker.background import kept

log = logging.getLogger(__name__)

POLL_S, REACH_S = 0.05, 5.0
MOST = 4096


class Head:
    """The process on the head; `run` is its whole life."""

    def __init__(self, config: FleetConfig, config_path: Path) -> None:
        self._config = config
        self._config_path = config_path
        self._endpoints: dict[int, str] = {}
        self._file = KeptFile(config.run_dir / "replicas.json")
        self._kept: dict[int, tuple[KeptReplica, asyncio.Task[None]]] = {}
        self._leaving: dict[KeptReplica, asyncio.Task[None]] = {}
        self._wanted = 0
        self._threads = 1
        self._stores: Stores
        self._apis: Apis | None = None

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; returns the exit status."""
        stop = asyncio.Event()
        _on_signals(stop)
        if not await self._connect(stop):
            return 0
        _on_signals(stop)  # Ray put handlers of its own there
        control = asyncio.create_task(self._serve_control())
        try:
            self._scale(self._config.replicas)
            await stop.wait()
        finally:
            control.cancel()
            await asyncio.gather(control, return_exceptions=True)
            self._scale(0)
            await asyncio.gather(*self._leaving.values(), return_exceptions=True)
            if self._apis is not None:
                self._apis.close()
            await self._stores.close()
            ray.shutdown()
        return 0

    async def _connect(self, stop: asyncio.Event) -> bool:
        """Join the cluster, pack what nodes need. False if told to stop meanwhile."""
        config = self._config
        await _reach(config.address)
        await asyncio.to_thread(
            ray.init,
            address=config.address,
            namespace=f"paddle-rollout-{config.name}",
            log_to_driver=False,
            configure_logging=False,
        )
        shipment = pack(self._config_path, config.name, config.run_dir / KEYS)
        self._threads = shipment.worker.get("threads") or max(1, int(config.cpus_per_rank))
        here = Place(ray.get_runtime_context().get_node_id(), str(ray.util.get_node_ip_address()), sees_head=True)
        relay = await self._relay_endpoint(config.head_host or here.host, stop)
        if stop.is_set():
            return False
        if config.node_apis:
            self._apis = Apis(config.run_dir, config.head_host or here.host, port=config.api_port, api=shipment.api)
        self._stores = Stores(
            ray.put(shipment),
            here,
            run_dir=config.run_dir,
            relay=relay,
            fan_out=config.fan_out,
            apis=self._apis,
            log_level=config.log_level,
        )
        log.info("in the Ray cluster, on node %s", here.node[:8], extra={"node": here.node, "relay": relay})
        return True

    async def _relay_endpoint(self, host: str, stop: asyncio.Event) -> str:
        """Where stores of other nodes join the head's, once it listens."""
        bound = self._config.run_dir / "relay_endpoint"
        while not stop.is_set():
            with contextlib.suppress(OSError):
                text = bound.read_text()
                if text.endswith("\n"):
                    return f"tcp://{bracketed(host)}:{text.strip().rpartition(':')[2]}"
            await asyncio.sleep(POLL_S)
        return ""

    def _scale(self, wanted: int) -> None:
        """Keep so many replicas from now on; the last ones leave first."""
        self._wanted = wanted
        for index in [i for i in self._kept if i >= wanted]:
            replica, task = self._kept.pop(index)
            self._leaving[replica] = asyncio.create_task(self._let_go(replica, task))
        for index in range(wanted):
            if index not in self._kept and not any(replica.index == index for replica in self._leaving):
                replica = KeptReplica(index, self._config, self._stores, self._threads, self._told)
                self._kept[index] = replica, asyncio.create_task(replica.run())

    async def _let_go(self, replica: KeptReplica, task: "asyncio.Task[None]") -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            await replica.leave()
        except Exception:  # whatever it was: it is gone from here, and may be wanted again
            log.exception("replica %d did not leave in order", replica.index)
        finally:
            del self._leaving[replica]
        if replica.index < self._wanted:  # asked for again meanwhile
            self._scale(self._wanted)

    def _told(self, index: int, endpoint: str | None) -> None:
        """Told of an endpoint, or of none any more: written where the API follows it."""
        if self._endpoints.get(index) == endpoint:
            return
        if endpoint is None:
            del self._endpoints[index]
        else:
            self._endpoints[index] = endpoint
        self._file.say(json.dumps(self._endpoints).encode())
        if self._apis is not None:
            self._apis.look()

    async def _serve_control(self) -> None:
        await kept("status and scaling", self._take_calls)

    async def _take_calls(self) -> None:
        context = zmq.asyncio.Context()
        control: Any = context.socket(zmq.ROUTER)
        control.set(zmq.LINGER, 200)
        control.bind(f"ipc://{self._config.run_dir / messages.SOCKET}")
        try:
            while True:
                peer, *frames = await control.recv_multipart()
                await control.send_multipart([peer, messages.encode(self._reply(frames[-1]))])
        finally:
            control.close()
            context.term()

    def _reply(self, frame: bytes) -> Reply:
        try:
            request = messages.decode_request(frame)
        except UNREADABLE as error:
            return Failed("", f"bad message: {error}")
        try:
            return self._do(request)
        except Exception as error:  # or nobody would be answered any more
            log.exception("%s could not be done", type(request).__name__)
            return Failed(request.call, f"it could not be done: {short(error)}")

    def _do(self, request: Request) -> Reply:
        match request:
            case Scale(replicas=wanted) if not 0 <= wanted <= MOST:
                return Failed(request.call, f"{wanted} replicas: 0 to {MOST} are possible")
            case Scale(replicas=wanted):
                log.info("%d replicas are wanted", wanted)
                self._scale(wanted)
            case GetFleet():
                pass
        everyone = [*(kept for kept, _ in self._kept.values()), *self._leaving]
        members = sorted((one.describe() for one in everyone), key=lambda member: member.replica)
        return FleetState(request.call, self._wanted, members)


async def _reach(address: str) -> None:
    """Ray itself tries for minutes and cannot be interrupted. Raises ConnectionError."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return
    try:
        async with asyncio.timeout(REACH_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError) as error:
        raise ConnectionError(str(error) or f"no answer within {REACH_S:g} s") from None
    writer.close()


def _on_signals(stop: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
