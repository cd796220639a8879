"""Everything one API process holds, put together once; routes get it as a dependency."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request

from api.background import kept
from api.config import ApiConfig
from api.control import Control
from api.fleet_settings import FleetSettings
from api.generation import Generations
from api.http_push import HttpPush
from api.members import ReplicasFile
from api.metrics import Metrics
from api.model import Model
from api.rate_limit import RateLimit
from api.replicas import Fleet
from api.versions import VersionNames
from api.weight_checks import WeightChecks
from api.weights import Weights
from rollout_client.curve import TrainerKeys


class Service:
    """See module. `running` keeps its links and deadlines going."""

    def __init__(self, config: ApiConfig, model: Model) -> None:
        self.config = config
        self.model = model
        self.started = time.time()
        self.fleet = Fleet(
            config.replica_endpoints,
            FleetSettings(
                quiet_s=min(6.0, config.silence_s / 3),
                silence_s=config.silence_s,
                stuck_s=max(config.stuck_s, config.silence_s),
                unready_hold_s=config.unready_hold_s,
                paused_hold_s=config.paused_hold_s,
                request_timeout_s=config.request_timeout_s,
                keys=TrainerKeys.read(config.replica_keys) if config.replica_keys else None,
            ),
        )
        self.weights = Weights(config.store_endpoint, self.fleet)
        self.versions = VersionNames(self.weights, config.state_dir or config.run_dir)
        self.control = Control(self.fleet, pause_lease_s=config.pause_lease_s)
        self.weight_checks = WeightChecks(self.control)
        self.http_push = HttpPush(self.weights, self.versions)
        self.rate_limit = RateLimit(config.requests_per_s) if config.requests_per_s else None
        self.generations = Generations(self.fleet, model, max_requests=config.max_requests)
        self.metrics = Metrics(self.fleet, self.weights, model=model.name, tp=config.tp, aliases=config.vllm_metrics)

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
        if self.config.replicas_file is not None:
            file = ReplicasFile(self.config.replicas_file)
            work["following the replicas file"] = lambda: file.follow(self.fleet.set_members)
        tasks = [asyncio.create_task(kept(what, run)) for what, run in work.items()]
        log = logging.getLogger("api")
        log.addHandler(self.metrics.recent.warnings)
        try:
            yield
        finally:
            log.removeHandler(self.metrics.recent.warnings)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.model.template_process is not None:
                await self.model.template_process.close()


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Uses = Annotated[Service, Depends(_service)]
"""Annotate a route's parameter with it."""
