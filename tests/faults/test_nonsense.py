"""Well-formed messages that make no sense, many of them: each is refused by itself and the store goes on."""

import time

import numpy as np
import pytest

from rollout_client import protocol as wire
from rollout_client.protocol import Part

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def store(shared_store):
    """One store for all of these tests: each leaves it serving, and pushes in a run of its own."""
    return shared_store


EDGES = [-(2**63), -1, 0, 1, 2, 3, 2**31, 2**63 - 1]


def nonsense(rng, placement):
    """A message of the right types that makes no sense."""
    n = lambda: int(rng.choice(EDGES))  # noqa: E731
    name = str(rng.choice([NORM, "model.embed_tokens.weight", "lm_head.weight", "", "x" * 500]))
    shapes = [(64,), (96, 64), (), (n(), n()), (0,), (64, 1)]
    shape = shapes[rng.integers(len(shapes))]
    box = {"offset": tuple(n() for _ in shape), "local_shape": tuple(n() for _ in shape)}
    form = [{}, box, {"flat": (n(), n())}, box | {"flat": (0, 4)}, {"offset": (1, 2, 3)}][rng.integers(5)]
    part = Part(name, str(rng.choice(["float32", "bfloat16", "float64", ""])), shape, **form)
    session = str(rng.choice([placement.session, placement.session, "", "other"]))
    makers = [
        lambda: wire.Begin(n(), [part] * int(rng.integers(3)), rank=n(), world=n(), transport="zmq"),
        lambda: wire.Begin(n(), [part], base_version=n(), force=True),
        lambda: wire.Chunk(session, n(), n(), [n()]),
        lambda: wire.Written(session, [(n(), n()), (n(), n())]),
        lambda: wire.Renew(session),
        lambda: wire.Seal(session, float(rng.choice([-1.0, 0.0, float("nan"), float("inf"), 1e300]))),
        lambda: wire.Commit(session, float(rng.choice([-1.0, 0.0, float("nan"), float("inf")]))),
        lambda: wire.Hello(str(rng.choice(["", "run", "r" * 1000])), protocol=n()),
    ]
    return makers[rng.integers(len(makers))]()


@pytest.mark.parametrize("seed", range(3))
def test_messages_without_sense_are_refused_one_by_one(served, store, trainer, weights, seed):
    rng = np.random.default_rng(seed)
    t = trainer()
    placement = t.begin(weights(9), 2, transport="zmq")
    for count in range(400):
        if count % 40 == 0:
            t.drain()
            answer = t.begin(weights(9), 2, transport="zmq")
            placement = answer if isinstance(answer, wire.Placement) else placement
        message = nonsense(rng, placement)
        t.say(message, *([b"1234"] if isinstance(message, wire.Chunk) else []))
    t.drain()
    assert store.process.poll() is None
    assert "could not be handled" not in (store.run_dir / "log").read_text()
    until_idle = time.monotonic() + 3
    while store.status().session is not None and time.monotonic() < until_idle:
        time.sleep(0.05)
    served.recovers()
