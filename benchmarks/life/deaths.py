"""What a death costs: a rank, the store, the API, killed under load."""

import contextlib
import os
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from rollout_client.errors import RolloutError
from rollout_client.http import RolloutClient
from tests.chaos.plan import unit_of
from tests.chaos.service import SPARE, Handle, by_name, serve
from tests.integration.live import LiveService
from tests.reference.checkpoint import CONFIG, Checkpoint, random_weights

CLIENTS = 8
BOUND_S = 60.0
VERSION = 7
"""Pushed before the deaths: what is on disk is version 0."""


class Load:
    """Clients that ask all the time; `ends` counts how, `wrong` what was not version 7's."""

    def __init__(self, url: str) -> None:
        self.ends: Counter[str] = Counter()
        self.versions: Counter[int] = Counter()
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(BOUND_S)

    def _ask(self, number: int) -> None:
        rng = np.random.default_rng(number)
        with RolloutClient(self._url) as client:
            while not self._stop.is_set():
                prompt = rng.integers(1, CONFIG["vocab_size"], 20).tolist()
                try:
                    output = client.generate(prompt_ids=prompt, max_tokens=48, ignore_eos=True).outputs[0]
                except RolloutError as error:
                    self.ends[type(error).__name__] += 1
                    time.sleep(0.05)
                else:
                    self.ends[str(output.finish_reason)] += 1
                    self.versions.update(span.version for span in output.spans)


def deaths(rounds: int, tp: int) -> dict[str, Any]:
    """Seconds until what was killed is back, each under load; the service had time to make its spares before.

    A rank is killed once more right after another, when no spare can have been made: "without a spare".
    """
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Checkpoint.random(Path(scratch) / "model", 1)
        live = serve(checkpoint.directory, 2, tp)
        try:
            live.start()
            with live.publisher("life") as publisher:
                publisher.push(random_weights(CONFIG, 2), VERSION)
            result: dict[str, list[dict[str, Any]]] = defaultdict(list)
            last = f"replica-1-rank-{tp - 1}"
            for _ in range(rounds):
                _wait_for_spares(live, tp)
                result["a rank"].append(_kill(live, "replica-0-rank-0", _serving(0)))
                result["a rank, without a spare"].append(_kill(live, last, _serving(1)))
            for _ in range(rounds):
                result["the store"].append(_kill(live, "store", _with_store))
                result["the API"].append(_kill(live, "api", _answering))
            live.stop()
        finally:
            live.close()
    return {name: _summary(ones) for name, ones in result.items()}


def _wait_for_spares(live: LiveService, count: int) -> None:
    _until(lambda: len(by_name(live).get(SPARE, [])) == count, 90.0)
    time.sleep(6.0)  # they load


def _kill(live: LiveService, name: str, back: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Under load, and with another second of load afterwards."""
    others = {n: pids for n, pids in by_name(live).items() if n != SPARE and unit_of(n) != unit_of(name)}
    with Load(live.url) as load, httpx.Client(base_url=live.url, timeout=5.0) as http:
        time.sleep(1.0)
        load_average = os.getloadavg()[0]
        (pid,) = by_name(live)[name]
        handle = Handle(pid)
        began = time.monotonic()
        handle.send(signal.SIGKILL)

        def is_back() -> bool:
            if by_name(live).get(name, [pid]) == [pid]:
                return False
            with contextlib.suppress(httpx.HTTPError, ValueError):
                return back(http.get("/v1/rollout/weights").json())
            return False

        _until(is_back, BOUND_S)
        seconds = time.monotonic() - began
        handle.close()
        time.sleep(1.0)
    lived = {n: pids for n, pids in by_name(live).items() if n in others} == others
    return {
        "seconds": round(seconds, 2),
        "load": round(load_average, 1),
        "ends": dict(load.ends),
        "wrong_version": sum(count for version, count in load.versions.items() if version != VERSION),
        "others_lived": lived,
    }


def _serving(replica: int) -> Callable[[dict[str, Any]], bool]:
    def is_serving(weights: dict[str, Any]) -> bool:
        it = weights["replicas"][replica]
        return bool(it["ready"]) and it["version"] == VERSION

    return is_serving


def _answering(weights: dict[str, Any]) -> bool:
    return all(replica["ready"] for replica in weights["replicas"])


def _with_store(weights: dict[str, Any]) -> bool:
    return bool(weights["store_connected"]) and _answering(weights)


def _until(what: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() >= end:
            raise TimeoutError(f"not within {seconds:g} s")
        time.sleep(0.02)


def _summary(ones: list[dict[str, Any]]) -> dict[str, Any]:
    ends: Counter[str] = Counter()
    for one in ones:
        ends.update(one["ends"])
    return {
        "median_s": statistics.median(one["seconds"] for one in ones),
        "max_s": max(one["seconds"] for one in ones),
        "loads": [one["load"] for one in ones],
        "requests": dict(ends),
        "wrong_version": sum(one["wrong_version"] for one in ones),
        "others_lived": all(one["others_lived"] for one in ones),
    }
