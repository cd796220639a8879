"""Pusher: a plain push for any training loop. It numbers versions and keeps counters.

with Pusher("tcp://127.0.0.1:5600", run_id="run-7") as push:
    for step in range(steps):
        ...
        push(model.state_dict())
        wandb.log(flat(push.counters))
"""

from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from rollout_client.curve import TrainerKeys
from rollout_client.protocol import InFlight
from rollout_client.publisher import DEFAULT_ENDPOINT, WeightPublisher
from rollout_client.push_report import PushReport
from rollout_client.tensors import Named


class Pusher:
    """Every call makes tensors live. One at a time; use it from any thread."""

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        run_id: str,
        in_flight: InFlight = "keep",
        timeout_s: float = 180.0,
        token: str = "",
        keys: str | Path | TrainerKeys | None = None,
        transport: Literal["auto", "shm", "zmq", "cuda_ipc"] = "auto",
    ) -> None:
        """See WeightPublisher; nothing is connected before the first use."""
        self._publisher = WeightPublisher(
            endpoint, run_id=run_id, token=token, keys=keys, transport=transport, progress=False
        )
        self._run_id = run_id
        self._in_flight = in_flight
        self._timeout_s = timeout_s
        self._version: int | None = None
        self.counters: dict[str, float] = {"pushes": 0, "bytes": 0, "seconds": 0.0, "stall_ms_max": 0.0}
        """pushes, bytes and seconds add up; version, stall_ms_max, last_seconds and replicas are of the last push."""

    @property
    def version(self) -> int | None:
        """The version of the last push of this run; None before the first."""
        return self._version

    def connect(self) -> None:
        """Reach the store and go on where this run stopped. Raises StoreUnavailable, Unauthorized."""
        welcome = self._publisher.connect()
        if self._version is None and welcome.live_run == self._run_id:
            self._version = welcome.live_version

    def __call__(self, named_tensors: Named, version: int | None = None) -> PushReport:
        """Make these tensors the live version; None = one above the last. Raises as WeightPublisher.push."""
        if version is None:
            if self._version is None:
                self.connect()
            version = 1 if self._version is None else self._version + 1
        report = self._publisher.push(named_tensors, version, in_flight=self._in_flight, timeout_s=self._timeout_s)
        self._version = report.version
        self._count(report)
        return report

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _count(self, report: PushReport) -> None:
        seconds = report.seconds.get("total", 0.0)
        self.counters["pushes"] += 1
        self.counters["bytes"] += report.nbytes
        self.counters["seconds"] += seconds
        self.counters["last_seconds"] = seconds
        self.counters["stall_ms_max"] = max(report.stall_ms.values(), default=0.0)
        self.counters["version"] = report.version
        self.counters["replicas"] = report.replicas
