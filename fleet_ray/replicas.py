"""One replica as the head keeps it: a placement group, an actor in it, and the endpoint that the API is told."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fleet_ray.actors import Accelerators, Place, ReplicaHost
from fleet_ray.config import FleetConfig
from fleet_ray.errors import NodeGone, short
from fleet_ray.messages import PlacedReplica
from fleet_ray.stores import Stores

log = logging.getLogger(__name__)

AGAIN_S, AGAIN_MAX_S = 0.5, 10.0
STEADY_S = 60.0
"""Who ran this long is tried again at once; others wait twice as long each time."""
STOP_S = 10.0
"""Seconds that a replica may take to stop, on top of its time to drain."""


class KeptReplica:
    """`run` keeps it serving somewhere until cancelled; then `leave`."""

    def __init__(
        self, index: int, config: FleetConfig, stores: Stores, threads: int, told: Callable[[int, str | None], None]
    ) -> None:
        """told: the replica's endpoint, or None when it has none any more."""
        self.index = index
        self.state = "placing"
        self.said = ""
        self._config = config
        self._stores = stores
        self._threads = threads
        self._told = told
        self._place: Place | None = None
        self._group: PlacementGroup | None = None
        self._actor: Any = None
        self._holders: list[Any] = []

    def describe(self) -> PlacedReplica:
        """Where it is and how it is, for people."""
        node, host = (self._place.node, self._place.host) if self._place else ("", "")
        return PlacedReplica(self.index, self.state, node, host, self.said)

    async def run(self) -> None:
        """Place the replica, start it, watch it; again whenever it ends."""
        wait_s = AGAIN_S
        while True:
            began = time.monotonic()
            self.state = "placing"
            try:
                why = await self._live_once()
                self._told(self.index, None)
            except Exception as error:  # not of Ray's: a replica that nobody keeps would never serve again
                log.exception("replica %d", self.index)
                why = short(error)
            self.said = why
            log.warning("replica %d: %s", self.index, why, extra={"replica": self.index})
            wait_s = AGAIN_S if time.monotonic() > began + STEADY_S else min(AGAIN_MAX_S, 2 * wait_s)
            await asyncio.sleep(wait_s / 2)

    async def _live_once(self) -> str:
        """Place the replica, and run it until it ends; returns why it did."""
        try:
            if self._actor is None:
                self._make()
            place = await self._actor.where.remote(str(self._config.run_dir / "config.json"))
        except RayError as error:
            if isinstance(error, ActorDiedError):
                self._give_back()  # not one that Ray restarts: begin again
            return short(error)
        return await self._serve(place)

    async def leave(self) -> None:
        """Drain the replica, take it out of what the API is told, give its place back."""
        self.state = "leaving"
        if self._actor is not None:
            try:
                async with asyncio.timeout(self._config.drain_s + STOP_S):
                    await self._actor.stop.remote()
            except (RayError, TimeoutError) as error:
                log.warning("replica %d did not stop in order: %s", self.index, short(error))
        self._told(self.index, None)
        self._give_back()
        if self._place is not None:
            self._stores.leave(self._place, self.index)

    async def _serve(self, place: Place) -> str:
        """Run the replica beside the store of that node until it ends; returns why it did."""
        try:
            if self._place is not None and self._place.node != place.node:
                self._stores.leave(self._place, self.index)
            self._place, self.state, self.said = place, "starting", ""
            run_dir = await self._stores.at(place, self.index)
            devices = [one for ids in await asyncio.gather(*(h.ids.remote() for h in self._holders)) for one in ids]
            # On a socket file no API of another node could reach it.
            host = "" if self._stores.serves_itself(place) and not self._config.node_apis else place.host
            self._told(self.index, await self._actor.start.remote(str(run_dir), host, devices))
            self.state = "running"
            said = {"replica": self.index, "node": place.node, "host": place.host}
            log.info("replica %d runs on node %s", self.index, place.node[:8], extra=said)
            return str(await self._actor.ended.remote())
        except (RayError, NodeGone) as error:
            return short(error)

    def _make(self) -> None:
        config = self._config
        bundle = {"CPU": config.cpus_per_rank, "GPU": config.gpus_per_rank}
        bundle = {name: amount for name, amount in bundle.items() if amount} or {"CPU": 0.001}  # none may be empty
        self._group = placement_group([bundle] * config.tp, strategy="STRICT_PACK", name=f"{config.name}-{self.index}")
        at = [PlacementGroupSchedulingStrategy(self._group, rank) for rank in range(config.tp)]
        if config.gpus_per_rank:
            self._holders = [
                ray.remote(Accelerators)
                .options(
                    num_cpus=0,
                    num_gpus=config.gpus_per_rank,
                    max_restarts=-1,
                    max_task_retries=-1,
                    scheduling_strategy=one,
                )
                .remote()
                for one in at
            ]
        self._actor = (
            ray.remote(ReplicaHost)
            .options(
                num_cpus=0 if config.gpus_per_rank else config.cpus_per_rank,
                max_restarts=-1,
                max_task_retries=0,
                scheduling_strategy=at[0],
            )
            .remote(
                self.index,
                tp=config.tp,
                threads=self._threads,
                drain_s=config.drain_s,
                log_level=config.log_level,
            )
        )

    def _give_back(self) -> None:
        for actor in (self._actor, *self._holders):
            if actor is not None:
                ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        self._actor, self._group, self._holders = None, None, []
