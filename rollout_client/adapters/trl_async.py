"""TRL's AsyncGRPOTrainer: the object for its `weight_transfer` argument.

trainer = AsyncGRPOTrainer(..., weight_transfer=WeightTransfer(url, endpoint, run_id="run-7"))
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from rollout_client.adapters.metrics import flat
from rollout_client.adapters.push import Pusher
from rollout_client.curve import TrainerKeys
from rollout_client.errors import RolloutError
from rollout_client.http import RolloutClient
from rollout_client.http_calls import DEFAULT_URL
from rollout_client.publisher import DEFAULT_ENDPOINT

logger = logging.getLogger(__name__)

LEASE_S = 600.0
"""A trainer that dies between pause and resume holds generation up for this long, not for ever."""


class WeightTransfer:
    """TRL's WeightTransferProtocol: init_weight_transfer, pause, send_weights, resume, destroy.

    A push needs no pause here, and is all or nothing: when `send_weights` raises, what is served has not changed.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        run_id: str,
        pause: Literal["never", "keep", "recompute", "abort"] = "recompute",
        token: str | None = None,
        push_token: str = "",
        push_keys: str | Path | TrainerKeys | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        """pause: what happens to running requests around a sync. recompute: as TRL's own transfer has it, held
        and their KV computed anew; keep: held, KV kept; abort: end with what they have; never: they go on
        during the push and keep their KV. token, push_token, push_keys: of the service's HTTP, and of its store.
        """
        self._client = RolloutClient(url, token=token)
        self._mode: Literal["never", "keep", "recompute", "abort"] = pause
        in_flight: Literal["keep", "recompute"] = "recompute" if pause == "recompute" else "keep"
        self._push = Pusher(
            endpoint, run_id=run_id, in_flight=in_flight, timeout_s=timeout_s, token=push_token, keys=push_keys
        )

    @property
    def version(self) -> int | None:
        """The last one sent."""
        return self._push.version

    def metrics(self) -> dict[str, float]:
        """Counters of the pushes, flat."""
        return flat(self._push.counters)

    def init_weight_transfer(self) -> None:
        """Reach both ends, so that what is wrong is said before training starts. Raises RolloutError."""
        self._client.ready()
        self._push.connect()

    def pause(self) -> None:
        """Hold generation."""
        if self._mode != "never":
            self._client.pause(self._mode, lease_s=LEASE_S, clear_cache=self._mode != "keep")

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Make (name, tensor) pairs live as the next version. Generation goes on if it fails."""
        try:
            report = self._push(iterator)
        except BaseException:
            self._resume_anyway()
            raise
        logger.info("weights are live as version %d after %.3f s", report.version, report.seconds.get("total", 0.0))

    def resume(self) -> None:
        """Let generation go on."""
        if self._mode != "never":
            self._client.resume()

    def destroy(self) -> None:
        """Leave the service generating, and disconnect. Idempotent."""
        self._resume_anyway()
        self._push.close()
        self._client.close()

    def _resume_anyway(self) -> None:
        try:
            self.resume()
        except (RolloutError, RuntimeError) as error:  # RuntimeError: the client is closed already
            logger.warning("could not resume generation: %s", error)
