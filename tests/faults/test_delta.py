"""Pushes of what differs, over ZMQ: the same to the bit, and whole again as soon as the base is in doubt."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from rollout_client.errors import PushError
from rollout_client.publisher import WeightPublisher
from rollout_client.tensors import Slice


@pytest.fixture
def publisher(store, run):
    with WeightPublisher(store.endpoint, run_id=run, transport="zmq", delta=True, progress=False) as made:
        yield made


@pytest.fixture
def check(store, digest_of):
    def check(report, version, tensors):
        assert report.version == version
        assert store.serving() == (version, digest_of(tensors)) == (version, report.digest)

    return check


def moved(tensors, share, seed=0):
    """With this share of the elements of each tensor changed, at random places."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, array in tensors.items():
        out[name] = array.copy()
        flat = out[name].reshape(-1)
        flat[rng.choice(flat.size, int(flat.size * share), replace=False)] += 1.5
    return out


def test_a_little_is_sent_as_a_little(publisher, check, weights):
    tensors = weights(1)
    first = publisher.push(tensors, 1, timeout_s=10)
    check(first, 1, tensors)
    assert first.sent == first.nbytes
    for version in (2, 3, 4):  # both slots have been the base
        tensors = moved(tensors, 0.01, version)
        report = publisher.push(tensors, version, timeout_s=10)
        check(report, version, tensors)
        assert 0 < report.sent < first.sent / 30


def test_nothing_changed_is_nothing_sent(publisher, check, weights):
    tensors = weights(1)
    publisher.push(tensors, 1, timeout_s=10)
    report = publisher.push({name: a.copy() for name, a in tensors.items()}, 2, timeout_s=10)
    check(report, 2, tensors)
    assert report.sent == 0


def test_where_most_has_changed_bytes_are_sent_as_they_are(publisher, check, weights):
    tensors = weights(1)
    whole = publisher.push(tensors, 1, timeout_s=10)
    mixed = {name: (weights(2)[name] if "mlp" in name else a) for name, a in tensors.items()}
    report = publisher.push(mixed, 2, timeout_s=10)
    check(report, 2, mixed)
    assert report.sent == sum(a.nbytes for name, a in mixed.items() if "mlp" in name)
    assert publisher.push(weights(3), 3, timeout_s=10).sent == whole.sent


def test_whole_again_when_somebody_else_was_here(publisher, push, check, weights):
    publisher.push(weights(1), 1, timeout_s=10)
    push(weights(2), 2)
    report = publisher.push(moved(weights(1), 0.01), 3, timeout_s=10)
    check(report, 3, moved(weights(1), 0.01))
    assert report.sent == report.nbytes


def test_whole_again_after_a_push_that_failed(publisher, check, weights):
    tensors = weights(1)
    publisher.push(tensors, 5, timeout_s=10)
    with pytest.raises(PushError):
        publisher.push(moved(tensors, 0.5), 4, timeout_s=10)  # stale: nothing was sent, the base is still good
    report = publisher.push(moved(tensors, 0.01), 6, timeout_s=10)
    check(report, 6, moved(tensors, 0.01))
    assert report.sent < report.nbytes / 30

    class Broken:
        dtype, shape = "float32", tensors["model.norm.weight"].shape
        element_size = staticmethod(lambda: 4)

        def __dlpack__(self, **_):
            raise AssertionError

        def __dlpack_device__(self):
            return (2, 0)

        def cpu(self):
            raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        publisher.push(moved(tensors, 0.02) | {"model.norm.weight": Broken()}, 7, timeout_s=10)
    report = publisher.push(moved(tensors, 0.03), 8, timeout_s=10)
    check(report, 8, moved(tensors, 0.03))
    assert report.sent == report.nbytes


def test_after_the_store_has_restarted(store, publisher, check, weights, until):
    tensors = weights(1)
    publisher.push(tensors, 1, timeout_s=10)
    store.end()
    store.start()
    until(lambda: store.status().live)
    changed = moved(tensors, 0.01)
    check(publisher.push(changed, 2, timeout_s=20), 2, changed)


def test_with_some_tensors_on_a_stated_base(publisher, check, weights):
    tensors = weights(1)
    publisher.push(tensors, 1, timeout_s=10)
    some = moved({"model.norm.weight": tensors["model.norm.weight"]}, 0.1)
    report = publisher.push(some, 2, base_version=1, timeout_s=10)
    check(report, 2, tensors | some)
    assert report.sent < 100
    after = moved(tensors | some, 0.01)
    report = publisher.push(after, 3, timeout_s=10)
    check(report, 3, after)
    assert report.sent < report.nbytes / 30


@pytest.mark.parametrize("store_config", [{"tp": 2}], ids=["tp2"])
def test_into_places_that_are_strided(store, publisher, weights):
    """With two ranks, tensors split on their second axis come through scratch. Read back by a plain push's digest."""
    tensors = weights(1)
    publisher.push(tensors, 1, timeout_s=10)
    changed = moved(tensors, 0.01)
    report = publisher.push(changed, 2, timeout_s=10)
    assert 0 < report.sent < report.nbytes / 20
    with WeightPublisher(store.endpoint, run_id="plain", transport="zmq", progress=False) as plain:
        assert plain.push(changed, 1, timeout_s=10).digest == report.digest


def test_whole_again_where_a_tensor_was_cut_otherwise_in_between(publisher, check, weights):
    tensors, name = weights(1), "model.embed_tokens.weight"
    publisher.push(tensors, 1, timeout_s=10)
    changed = moved({name: tensors[name]}, 0.1)[name]
    half = len(changed) // 2
    pieces = [Slice(changed[:half], changed.shape, offset=(0, 0)), Slice(changed[half:], changed.shape, (half, 0))]
    report = publisher.push([(name, piece) for piece in pieces], 2, base_version=1, timeout_s=10)
    check(report, 2, tensors | {name: changed})
    report = publisher.push(tensors, 3, timeout_s=10)
    check(report, 3, tensors)
    assert report.sent == changed.nbytes


def test_whole_again_where_another_rank_may_have_changed_it(store, run, check, weights):
    tensors = weights(1)
    first, other = list(tensors)[:2]
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        ranks = [
            stack.enter_context(WeightPublisher(store.endpoint, run_id=run, transport="zmq", delta=True))
            for _ in range(2)
        ]

        def push(version, *shares, **more):
            pushes = [
                pool.submit(ranks[n].push, share, version, rank=n, world=2, timeout_s=10, **more)
                for n, share in enumerate(shares)
            ]
            return [push.result() for push in pushes]

        rest = {name: array for name, array in tensors.items() if name != other}
        push(1, rest, {other: tensors[other]})
        changed = moved({name: tensors[name] for name in (first, other)}, 0.1)
        push(2, {other: changed[other]}, {first: changed[first]}, base_version=1)
        now = tensors | {other: changed[other]}
        for report in push(3, rest, {other: now[other]}):
            check(report, 3, now)
