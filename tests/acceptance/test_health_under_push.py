"""A trainer that kills an engine which does not answer /health_generate finds this one alive: 1 GB lands meanwhile."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.acceptance.tools import takes_minutes
from tests.integration.conftest import running
from tests.integration.live import LiveService
from tests.reference.checkpoint import Checkpoint

ENOUGH = 10
"""Answers that are looked at while bytes land; one push may be over before the second."""
WITHIN_S = 1.0
GIGABYTE = 10**9
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 17,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 1024,
}

pytestmark = [takes_minutes, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    made = Checkpoint.random(tmp_path_factory.mktemp("large") / "model", seed=1, **SHAPE)
    assert sum(tensor.nbytes for tensor in made.weights.values()) >= GIGABYTE
    return made


@pytest.fixture(scope="module")
def live(large: Checkpoint) -> Iterator[LiveService]:
    yield from running(large.directory, "--set", f'store.disk_roots=["{large.directory.parent}"]')


def by_push(transport: str) -> Callable[[LiveService, Checkpoint], None]:
    versions = itertools.count(1)

    def push(live: LiveService, large: Checkpoint) -> None:
        with live.publisher(f"by-{transport}", transport=transport) as publisher:
            publisher.push(large.weights, version=next(versions))

    return push


def by_disk(path: str, field: str) -> Callable[[LiveService, Checkpoint], None]:
    def load(live: LiveService, large: Checkpoint) -> None:
        httpx.post(live.url + path, json={field: str(large.directory)}, timeout=120).raise_for_status()

    return load


def by_checksum(live: LiveService, large: Checkpoint) -> None:
    httpx.post(live.url + "/weight_checker", json={"action": "checksum"}, timeout=120).raise_for_status()


@pytest.mark.parametrize(
    "bring",
    [
        by_push("shm"),
        by_push("zmq"),
        by_disk("/update_weights_from_disk", "model_path"),
        by_disk("/update_weights", "weight_dir"),
        by_checksum,
    ],
    ids=["shm", "zmq", "sglang-disk", "vllm-disk", "checksum"],
)
def test_health_generate_answers_within_a_second(
    live: LiveService, large: Checkpoint, bring: Callable[[LiveService, Checkpoint], None]
) -> None:
    took: list[float] = []
    over = threading.Event()

    def watch() -> None:
        with httpx.Client(base_url=live.url, timeout=30.0) as client:
            while not over.is_set():
                began = time.monotonic()
                assert client.get("/health_generate").status_code == 200
                took.append(time.monotonic() - began)
                over.wait(0.02)

    def write() -> None:
        with live.client() as client:
            for _ in client.stream(prompt_ids=[1, 2, 3], max_tokens=200, ignore_eos=True):
                if over.is_set():
                    return

    others = [threading.Thread(target=watch), threading.Thread(target=write)]
    for thread in others:
        thread.start()
    time.sleep(0.5)
    began, before = time.monotonic(), len(took)
    while len(took) - before < ENOUGH and time.monotonic() < began + 40:
        bring(live, large)
    seconds, during = time.monotonic() - began, len(took) - before
    over.set()
    for thread in others:
        thread.join(30)
    print(f"{seconds:.2f} s, {during} answers meanwhile, slowest {max(took) * 1e3:.0f} ms")
    assert during >= ENOUGH
    assert max(took) < WITHIN_S
