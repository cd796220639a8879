"""A store on every node that has a replica of ours, each below another one."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fleet_ray.actors import NodeStore, Place
from fleet_ray.apis import Apis
from fleet_ray.errors import NodeGone, short
from fleet_ray.shipment import sweep
from fleet_ray.tree import ROOT, Tree

log = logging.getLogger(__name__)

AGAIN_S = 1.0
STOP_S = 10.0
SWEEP_S = 8.0


class Stores:
    """`at` brings one up, `leave` lets go of it. Only the head's loop touches it."""

    def __init__(
        self,
        shipment: Any,
        head: Place,
        *,
        run_dir: Path,
        relay: str,
        fan_out: int,
        apis: Apis | None = None,
        log_level: str,
    ) -> None:
        """shipment: a reference to it in Ray's store. relay: where stores join the head's. apis: nodes have some."""
        self._shipment = shipment
        self._head = head
        self._run_dir = run_dir
        self._relay = relay
        self._apis = apis
        self._log_level = log_level
        self._tree = Tree(fan_out)
        self._lives: dict[str, _Life] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._noted = run_dir / "store-nodes"
        self._former = set(self._noted.read_text().split()) if self._noted.exists() else set()

    def serves_itself(self, place: Place) -> bool:
        """Whether replicas there use the head's store: on the head's own node."""
        return place.node == self._head.node and place.sees_head

    async def at(self, place: Place, replica: int) -> Path:
        """The run directory of the node's store, once that is there. Raises NodeGone."""
        if self.serves_itself(place):
            return self._run_dir
        life = self._lives.get(place.node)
        if life is None:
            self._tree.add(place.node)
            self._note(place.node)
            life = _Life(place.node, self._shipment, self._upstream, self._remove, self._apis, self._log_level)
            self._lives[place.node] = life
        life.users.add(replica)
        return await life.up()

    def _note(self, node: str) -> None:
        """Write down that there is a store on the node, for who comes after us if we are killed."""
        try:
            with self._noted.open("a") as file:
                file.write(f"{node}\n")
        except OSError as error:
            log.warning("%s cannot be written, a kill would leave files on node %s: %s", self._noted, node[:8], error)

    def leave(self, place: Place, replica: int) -> None:
        """A replica is gone from there; with the last one the node's store ends."""
        life = self._lives.get(place.node)
        if life is None:
            return
        life.users.discard(replica)
        if not life.users:
            self._remove(place.node)

    def _remove(self, node: str) -> None:
        """End a node's store; those below it join elsewhere."""
        life = self._lives.pop(node, None)
        orphans = [self._lives[one] for one in self._tree.remove(node) if one in self._lives]
        if life is not None:
            ending = asyncio.create_task(_end(life, orphans))
            self._stopping.add(ending)
            ending.add_done_callback(self._stopping.discard)

    async def close(self) -> None:
        """Stop all."""
        lives, self._lives = list(self._lives.values()), {}
        await _all_of(*(life.stop() for life in lives), *self._stopping)
        await self._clear_up_after({life.node for life in lives})
        self._noted.unlink(missing_ok=True)

    async def _clear_up_after(self, ended: set[str]) -> None:
        """If this process was killed once, so were its stores with it: what they left where none has come again."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        at = [NodeAffinitySchedulingStrategy(node, soft=False) for node in (self._former & alive) - ended]
        tasks = [
            ray.remote(sweep).options(num_cpus=0, max_retries=0, scheduling_strategy=one).remote(self._shipment)
            for one in at
        ]
        try:
            await asyncio.wait_for(_all_of(*(_of(task) for task in tasks)), SWEEP_S)
        except TimeoutError:
            log.warning("files of stores that were killed may be left on %d nodes", len(tasks))

    async def _upstream(self, node: str) -> str:
        above = self._tree.above(node)
        if above == ROOT:
            return self._relay
        await self._lives[above].up()
        return self._lives[above].relay


class _Life:
    """One node's store: an actor bound to that node, which Ray restarts there."""

    def __init__(
        self,
        node: str,
        shipment: Any,
        upstream: Callable[[str], Awaitable[str]],
        gone: Callable[[str], None],
        apis: Apis | None,
        log_level: str,
    ) -> None:
        """gone: the node is no more."""
        self._apis = apis
        self.node = node
        self.users: set[int] = set()
        self.relay = ""
        self._upstream, self._gone = upstream, gone
        self._shipment, self._log_level = shipment, log_level
        self._actor: Any = None
        self._run_dir: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep())

    async def up(self) -> Path:
        """Wait until the store listens; its run directory. Raises NodeGone, also when it is stopped before."""
        await asyncio.wait([self._run_dir])
        if self._run_dir.cancelled():
            raise NodeGone(f"node {self.node[:8]}: its store was stopped")
        return self._run_dir.result()

    async def move(self) -> None:
        """Join another store above: the one before is gone."""
        if self._run_dir.done():
            try:
                await self._actor.start.remote(await self._upstream(self.node))
            except (RayError, NodeGone, KeyError) as error:  # `_keep` sees to it
                log.warning("the store of node %s: %s", self.node[:8], short(error))

    async def stop(self) -> None:
        """End it, and remove what it wrote, if the node is still there."""
        self._task.cancel()
        if self._apis is not None:
            self._apis.gone(self.node)
        if not self._run_dir.done():
            self._run_dir.cancel()
        elif not self._run_dir.cancelled():
            self._run_dir.exception()  # seen
        if self._actor is None:
            return
        try:
            await asyncio.wait_for(_of(self._actor.stop.remote()), STOP_S)
        except (RayError, TimeoutError) as error:
            log.warning("the store of node %s did not stop in order: %s", self.node[:8], short(error))
        ray.kill(self._actor)

    async def _keep(self) -> None:
        while True:
            try:
                if self._actor is None:
                    self._actor = self._make()
                await self._actor.alive.remote()
                run_dir, self.relay = await self._actor.start.remote(await self._upstream(self.node))
                log.info("node %s: store is up", self.node[:8], extra={"node": self.node, "relay": self.relay})
                if not self._run_dir.done():
                    self._run_dir.set_result(Path(run_dir))
                if self._apis is not None:
                    self._apis.beside(self.node, self._actor)
                why = await self._actor.ended.remote()
            except ActorUnschedulableError as error:
                self._actor = None
                if not self._run_dir.done():
                    self._run_dir.set_exception(NodeGone(f"node {self.node[:8]}: {short(error)}"))
                log.warning("node %s has left the cluster", self.node[:8], extra={"node": self.node})
                self._gone(self.node)
                return
            except (NodeGone, KeyError) as error:  # the one above is gone: the tree has another by now
                why = f"the store above: {short(error)}"
            except RayError as error:
                why = short(error)
                if isinstance(error, ActorDiedError):
                    self._actor = None  # Ray does not restart this one
            except Exception as error:  # not of Ray's: a store that nobody keeps would be started by nobody again
                log.exception("the store of node %s", self.node[:8], extra={"node": self.node})
                why = short(error)
            log.warning("node %s: store: %s", self.node[:8], why, extra={"node": self.node})
            await asyncio.sleep(AGAIN_S)

    def _make(self) -> Any:
        return (
            ray.remote(NodeStore)
            .options(
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(self.node, soft=False),
            )
            .remote(self._shipment, self._log_level)
        )


async def _end(life: _Life, orphans: list[_Life]) -> None:
    moves = [asyncio.create_task(orphan.move()) for orphan in orphans]
    if moves:
        await asyncio.wait(moves, timeout=STOP_S)  # they go on after that: the one above them may come up later
    await life.stop()
    await _all_of(*moves)


async def _all_of(*works: Awaitable[None]) -> None:
    """Wait for all, whatever becomes of each: one store that fails keeps no other from ending."""
    for result in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(result, Exception):
            log.error("a store: %s", short(result), exc_info=result)


async def _of(reference: Any) -> Any:
    return await reference
