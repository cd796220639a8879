"""Everything one API process holds, put together once; routes get it as a dependency."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Header, Request

from api.adapter_names import AdapterNames
from api.answering import Outlet
from api.config import ApiConfig
from api.control import Control
from api.generation import Aborted, Generations
from api.http_push import HttpPush
from api.members import ReplicasFile
from api.metrics import Metrics
from api.model import Model
from api.processes.peers import Peers
from api.rate_limit import RateLimit
from api.replicas import Fleet
from api.units import Units
from api.versions import VersionNames
from api.weight_checks import WeightChecks
from api.weights import Weights
from worker.background import kept

if TYPE_CHECKING:
    from api.nodes.everywhere import Everywhere
    from api.nodes.to_head import HeadPassing
    from api.processes.passing import Passing


class Service:
    """Parts of one API process; `running` keeps its links and deadlines going."""

    def __init__(self, config: ApiConfig, model: Model, index: int = 0) -> None:
        """index: of this process among those of the API."""
        self.config = config
        self.peers = Peers(config.run_dir, index, config.workers) if config.workers > 1 else None
        self.passing = _passing(self.peers, config.silence_s) if self.peers else None
        self.head = _head(config) if config.head_url else None
        self.others = _others(config) if config.replicas_file and not config.head_url else None
        self.model = model
        self.started = time.time()
        self._began = time.monotonic()
        self.probe: asyncio.Task[bool] | None = None  # of /health_generate
        self.outlet = Outlet(model)
        self.fleet = Fleet(config, self.peers, self.outlet.lanes)
        self.weights = Weights(config.store_endpoint, self.fleet)
        self.adapters = AdapterNames(model, self.weights)
        self.versions = VersionNames(self.weights, config.state_dir or config.run_dir, self.outlet.lanes.settle_all)
        if not config.head_url and (self.peers is None or self.peers.leads):
            self.versions.tidy()
        self.control = Control(self.fleet, pause_lease_s=config.pause_lease_s)
        self.weight_checks = WeightChecks(self.control)
        self.http_push = HttpPush(self.weights, self.versions)
        shared = self.peers.directory if self.peers else None
        self.rate_limit = RateLimit(config.requests_per_s, shared) if config.requests_per_s else None
        self.generations = Generations(self.fleet, model, max_requests=config.max_requests)
        self.units = Units(config.run_dir)
        self.metrics = Metrics(
            self.fleet, self.weights, self.units, model=model.name, tp=config.tp, aliases=config.vllm_metrics
        )
        self.generations.abort_elsewhere = self._abort_elsewhere
        if self.peers is not None:
            self.versions.on_given = self.peers.board.tell
            self.peers.on_news = self.versions.read_again

    async def abort_here(self, request_ids: list[str] | None, timeout_s: float) -> int:
        """End requests of this process, by id or all; returns how many."""
        return await self.generations.abort_here(request_ids, timeout_s=timeout_s)

    async def _abort_elsewhere(self, request_ids: list[str] | None, timeout_s: float) -> Aborted:
        asked = [] if self.others is None else [self.others.abort(request_ids, timeout_s)]
        if self.peers is not None and self.passing is not None:
            others = [index for index in range(self.peers.count) if index != self.peers.index]
            asked += [self.passing.abort(index, request_ids, timeout_s) for index in others]
        return Aborted.sum(await asyncio.gather(*asked))

    @property
    def uptime_s(self) -> float:
        """How long there has been this process; `started` is when, by a clock that may be set."""
        return time.monotonic() - self._began

    @property
    def ready(self) -> bool:
        """Whether requests are taken: some replica is ready, and what it serves may be served."""
        return any(r.is_ready(self.fleet.live) for r in self.fleet.replicas) and not self.weights.fenced

    @property
    def own_url(self) -> str:
        """Where this API was bound."""
        try:
            return (self.config.run_dir / "http_url").read_text().strip()
        except OSError:
            return ""

    @property
    def push_endpoint(self) -> str:
        """Where trainers connect; the store writes down which port it got."""
        try:
            return (self.config.run_dir / "push_endpoint").read_text().strip()
        except OSError:
            return self.config.push_endpoint

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Links up, deadlines kept, for the time of the context."""
        work: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "the links to replicas": self.fleet.run,
            "the link to the store": self.weights.link.run,
        }
        loading = asyncio.create_task(self.outlet.lanes.load())
        if self.config.replicas_file is not None:
            file = ReplicasFile(self.config.replicas_file)
            work["following the replicas file"] = lambda: file.follow(self.fleet.set_members)
        if self.head is not None:
            work["following the names of versions"] = self.versions.follow
        tasks = [asyncio.create_task(kept(what, run)) for what, run in work.items()]
        log = logging.getLogger("api")
        log.addHandler(self.metrics.recent.warnings)
        try:
            yield
        finally:
            log.removeHandler(self.metrics.recent.warnings)
            for task in (*tasks, loading):
                task.cancel()
            await asyncio.gather(*tasks, loading, return_exceptions=True)
            self.outlet.lanes.unload()
            for way in (self.passing, self.head):
                if way is not None:
                    await way.close()
            if self.model.template_process is not None:
                await self.model.template_process.close()


def _passing(peers: Peers, silence_s: float) -> "Passing":
    from api.processes.passing import Passing  # noqa: PLC0415  an HTTP client, which one process alone does not need

    return Passing(peers, silence_s=silence_s)


def _head(config: ApiConfig) -> "HeadPassing":
    from api.nodes.to_head import HeadPassing  # noqa: PLC0415  as above

    return HeadPassing(config.head_url, silence_s=config.silence_s)


def _others(config: ApiConfig) -> "Everywhere":
    from api.nodes.everywhere import Everywhere  # noqa: PLC0415  as above

    return Everywhere(config.run_dir / "apis.json", config.admin_token or config.data_token)


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Uses = Annotated[Service, Depends(_service)]
"""Annotate a route's parameter with it."""
SessionHeader = Annotated[str, Header(max_length=256)]
"""Annotate a data route's parameter `x_session_id` with it: requests of one session prefer one replica."""
