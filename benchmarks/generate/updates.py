"""What a weight update every two seconds costs running generation.

    python -m benchmarks.generate.updates [--dtype float32] [--rounds 5] [--budget 270] [--seconds 60]

A load of 16 sequences at a time (32 prompt tokens, 96 new ones each, as many of them as take about a minute) runs with
and without a trainer in another thread that pushes whole new weights through shared memory every two seconds, policy
keep. A round has both, in turn first; share is the throughput with updates over that without.
"""

import asyncio
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.generate.rounds import Round, Section, arguments
from benchmarks.generate.servers import LIMITS, Service
from rollout_client.publisher import WeightPublisher

COUNT, LENGTH, NEW = 16, 32, 96
EVERY_S = 2.0


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the load lasts without updates, about")
    args = parser.parse_args()
    section = Section(args.out, f"updates/{args.dtype}", args.rounds, args.budget)
    if not section.lacking:
        return
    from safetensors.numpy import load_file

    weights = load_file(args.model / "model.safetensors")
    log = Path(tempfile.mkdtemp(prefix="bench-generate-log-")) / "service.log"
    service = Service("service", args.model, args.dtype, log)
    try:
        with Trainer(service.push_endpoint, weights) as trainer:
            service.settle()
            trainer.push()
            asyncio.run(load(service.url, 2 * COUNT))
            requests = max(COUNT, round(4 * COUNT * args.seconds / asyncio.run(load(service.url, 4 * COUNT))))

            def measure(number: int) -> Round:
                took: dict[bool, float] = {}
                for updates in (True, False) if number % 2 else (False, True):
                    before = trainer.version
                    if updates:
                        with trainer.pushing():
                            took[updates] = asyncio.run(load(service.url, requests))
                        pushed = trainer.version - before
                    else:
                        took[updates] = asyncio.run(load(service.url, requests))
                return {
                    "plain_s": round(took[False], 2),
                    "updated_s": round(took[True], 2),
                    "updates": pushed,
                    "share": round(took[False] / took[True], 4),
                }

            section.collect(measure)
    finally:
        service.close()


async def load(url: str, requests: int) -> float:
    """Seconds for so many requests, COUNT at a time."""
    random = np.random.default_rng()
    left = iter(range(requests))
    async with httpx.AsyncClient(limits=LIMITS, timeout=120.0) as client:

        async def caller() -> None:
            for _ in left:
                ids = random.integers(1000, 40000, LENGTH).tolist()
                body = {"prompt_ids": ids, "max_tokens": NEW, "ignore_eos": True}
                (await client.post(f"{url}/v1/rollout/generate", json=body)).raise_for_status()

        began = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(COUNT)))
        return time.perf_counter() - began


class Trainer:
    """Pushes the same checkpoint as ever new versions."""

    def __init__(self, endpoint: str, weights: dict[str, Any]) -> None:
        self.version = 0
        self._publisher = WeightPublisher(endpoint, run_id=f"bench-{uuid.uuid4().hex[:8]}", progress=False)
        self._weights = weights
        self._stop = threading.Event()

    def __enter__(self) -> "Trainer":
        self._publisher.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._publisher.__exit__(*error)

    def push(self) -> None:
        self.version += 1
        self._publisher.push(self._weights, version=self.version, in_flight="keep")

    def pushing(self) -> "Pushing":
        return Pushing(self)


class Pushing:
    """While entered, a push begins every EVERY_S."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._stop = trainer, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._failure: Exception | None = None

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure:
            raise self._failure

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._stop.wait(max(0.0, due - time.monotonic())):
                self._trainer.push()
                due = max(due + EVERY_S, time.monotonic())
        except Exception as error:
            self._failure = error


if __name__ == "__main__":
    main()
