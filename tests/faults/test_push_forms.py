"""Pushes from several trainer ranks, of slices, of some tensors only; and very many of them."""

import os
import shutil
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from rollout_client import errors
from rollout_client import protocol as wire
from rollout_client.publisher import WeightPublisher
from rollout_client.tensors import Slice

NORM = "model.norm.weight"


def shards(tensors, world):
    """Flat ranges of every tensor, as a ZeRO stage 3 trainer holds them; uneven on purpose."""
    ranks = [{} for _ in range(world)]
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        cuts = [0, *sorted((flat.size * (r + 1) // world - r % 2) for r in range(world - 1)), flat.size]
        for rank, (start, stop) in enumerate(pairwise(cuts)):
            ranks[rank][name] = Slice(flat[start:stop], tensor.shape, start=start)
    return ranks


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_three_trainer_ranks_push_one_version(store, replica, weights, digest_of, transport):
    r = replica()
    results: list[object] = [None] * 3

    def rank(number, pieces):
        try:
            with WeightPublisher(store.endpoint, run_id="run", transport=transport, progress=False) as publisher:
                results[number] = publisher.push(pieces, 1, rank=number, world=3, timeout_s=10)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=rank, args=item) for item in enumerate(shards(weights(5), 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert [getattr(result, "digest", result) for result in results] == [digest_of(weights(5))] * 3
    assert store.serving() == r.served() == (1, digest_of(weights(5)))


def join(trainer, pieces, rank, version=1):
    t = trainer()
    t.tensors = {n: s.data for n, s in pieces.items()}
    t.sources = list(t.tensors.values())
    parts = [wire.Part(n, "float32", s.shape, flat=(s.start, s.start + s.data.size)) for n, s in pieces.items()]
    t.welcome = t.hello()
    t.placement = t.ask_begin(wire.Begin(version, parts, rank=rank, world=2))
    return t


def test_a_rank_that_leaves_a_gap_ends_the_push_for_all(store, trainer, push, weights, digest_of):
    first, second = shards(weights(5), 2)
    a = join(trainer, first, 0)
    assert isinstance(a.placement, wire.Placement)
    b = join(trainer, second | {NORM: Slice(second[NORM].data[1:], (64,), start=second[NORM].start + 1)}, 1)
    assert (b.placement.code, b.placement.tensors) == ("missing_tensor", [NORM])
    assert (a.ask(wire.Seal(a.placement.session))).tensors == [NORM]
    push(weights(2), 1)
    assert store.serving() == (1, digest_of(weights(2)))


def test_a_rank_that_never_comes_costs_one_deadline(store, trainer, push, weights, within):
    a = join(trainer, shards(weights(5), 2)[0], 0)
    a.say(wire.Written(a.placement.session, a.write()))
    with within(2):
        assert a.ask(wire.Seal(a.placement.session, deadline_s=1.0)).code == "deadline"
    assert push(weights(2), 1).version == 1


def test_a_rank_that_dies_after_its_seal_does_not_matter_one_before_does(store, trainer, weights, until):
    first, second = shards(weights(5), 2)
    a, b = join(trainer, first, 0), join(trainer, second, 1)
    a.say(wire.Written(a.placement.session, a.write()))
    a.say(wire.Seal(a.placement.session))
    answer = a.hear(3)  # b says nothing more: its lease ends the push
    assert answer.code == "lease_expired"
    assert "rank 1 of 2" in answer.message
    assert b.ask(wire.Renew(b.placement.session)).code == "lease_expired"


def test_the_same_rank_cannot_join_twice(store, trainer, weights):
    first, _ = shards(weights(5), 2)
    a, again = join(trainer, first, 0), join(trainer, first, 0)
    assert (again.placement.code, again.placement.retryable) == ("busy", True)
    assert isinstance(a.ask(wire.Renew(a.placement.session)), wire.Renewed)


def test_a_partial_push_takes_the_rest_from_its_base(store, replica, push, weights, digest_of):
    r = replica()
    push(weights(1), 1)
    some = {n: weights(2)[n] for n in (NORM, "model.layers.1.mlp.up_proj.weight")}
    report = push(some, 2, base_version=1)
    expected = weights(1) | some
    assert report.digest == digest_of(expected)
    assert store.serving() == r.served() == (2, digest_of(expected))
    with pytest.raises(errors.InvalidPush) as refused:
        push(some, 3, base_version=1)
    assert refused.value.code == "base_mismatch"
    assert store.serving() == r.served() == (2, digest_of(expected))


def test_a_commit_that_cannot_be_written_down_is_rolled_back(launch, weights, digest_of, tmp_path):
    state = tmp_path / "state"
    store = launch(state_dir=str(state)).wait_live()
    with WeightPublisher(store.endpoint, run_id="run", progress=False) as publisher:
        publisher.push(weights(1), 1, timeout_s=30)
        shutil.rmtree(state)
        with pytest.raises(errors.StoreFailed, match="could not be written down"):
            publisher.push(weights(2), 2, timeout_s=30)
        assert store.serving() == (1, digest_of(weights(1)))
        state.mkdir()
        publisher.push(weights(2), 2, timeout_s=30)
        assert store.serving() == (2, digest_of(weights(2)))


def test_five_hundred_pushes_leave_no_trace(store, replica, weights):
    r = replica()
    proc = Path(f"/proc/{store.process.pid}")

    def size():
        pages = int((proc / "statm").read_text().split()[1])
        shm = sum(path.stat().st_blocks for path in store.arena_dir.iterdir())
        return pages * os.sysconf("SC_PAGE_SIZE"), len(list((proc / "fd").iterdir())), shm

    versions = [weights(n) for n in range(3)]
    with WeightPublisher(store.endpoint, run_id="run", progress=False) as publisher:
        for version in range(1, 301):  # the history is full after 256
            publisher.push(versions[version % 3], version, timeout_s=30)
        before = size()
        for version in range(301, 501):
            publisher.push(versions[version % 3], version, timeout_s=30)
    after = size()
    assert after[0] - before[0] < 2 << 20  # one forgotten plan per push would be more
    assert after[1] <= before[1]
    assert after[2] == before[2]
    assert r.live.version == 500
