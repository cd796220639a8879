"""Ranks that share a model, each of which copies its part of a version out of a torch trainer's memory, on the last of
the devices: real ranks, loops, sums and mappings, between a scripted store and API. What is measured is printed."""

import ctypes
import os
import time

import numpy as np
import pytest

from benchmarks.gpu import replay
from rollout_client.device_slots import socket_of
from rollout_client.offers import Offers
from rollout_client.own_memory import Run
from tests.gpu.tp_replica import TP, Asking, show
from weight_manager.layout import packed, region_digests
from weight_manager.messages import Finalize, Finalized, Prepare, Prepared

pytestmark = [pytest.mark.timeout(240)]
UPDATES = int(os.environ.get("TP_UPDATES", "60"))


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < TP:
        pytest.skip(f"needs {TP} devices")
    return torch


class Trainer:
    """A version's bytes as tensors of a GPU."""

    def __init__(self, torch, ranks):
        self._torch, self._ranks = torch, ranks
        self._device = torch.device("cuda", torch.cuda.device_count() - 1)
        self._paths = [str(socket_of(ranks.run_dir, 0, rank)) for rank in range(TP)]
        with torch.cuda.device(self._device):
            torch.zeros(1, device=self._device)
            self._offers = Offers(ctypes.CDLL("libcuda.so.1"))
        self._tensors = []

    def push(self, live, *, anew):
        """How many ranks have taken what the arena's slot has. anew: it lies in other memory than before."""
        if anew:
            self._tensors.clear()
            self._torch.cuda.empty_cache()
        layout, slot = self._ranks.layout, np.array(self._ranks.arena.slot(live.slot))
        fresh = [self._torch.from_numpy(slot[start : start + nbytes]) for start, nbytes in layout.ranges]
        if self._tensors:
            for there, values in zip(self._tensors, fresh, strict=True):
                there.copy_(values)
        else:
            self._tensors = [values.to(self._device) for values in fresh]
        self._torch.cuda.synchronize(self._device)
        runs = [
            Run(start, tensor.data_ptr(), nbytes)
            for (start, nbytes), tensor in zip(layout.ranges, self._tensors, strict=True)
        ]
        with self._torch.cuda.device(self._device):
            self._offers.begin(self._paths, live.slot, live.write_epoch)
            self._offers.take(runs, last=True)
            taken = self._offers.taken()
            self._offers.end()
        return taken

    def close(self):
        self._offers.close()


@pytest.fixture
def trainer(torch, ranks):
    made = []

    def start(r):
        made.append(Trainer(torch, r))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_every_token_follows_while_ranks_take_versions_from_a_trainers_gpu(ranks, trainer, tmp_path):
    """The arena's slot has nothing of it by the time at which ranks vote: what they serve, they have from the trainer.
    Every third version lies in memory that they map anew, and unmap what was there, beside sums.
    """
    r = ranks()
    asking, pusher, times = Asking(r), trainer(r), []
    for version in range(2, UPDATES + 2):
        asking.ask()
        asking.run(60)
        live = r.write(version, (version + 1) % 2)
        memory = r.arena.slot(live.slot)
        digests = packed(region_digests(r.layout, memory))
        began = time.monotonic()
        assert pusher.push(live, anew=version % 3 == 0) == TP
        times.append(time.monotonic() - began)
        memory[:] = bytes(len(memory))
        session = f"s{version}"
        r.store.send(Prepare(session, live, replay.POLICIES[version % 4], 30.0, regions=digests))
        vote = r.store.expect(Prepared)
        assert vote.ok, vote
        assert r.store.flip(session).ok
        r.store.send(Finalize(session))
        r.store.expect(Finalized)
        asking.take()
    asking.take(all_of_them=True)
    show(updates=UPDATES, taken_ms=1e3 * float(np.median(times)), worst_ms=1e3 * max(times))
    follows, spread = asking.follow(tmp_path / "found.json")
    assert follows
    assert spread > UPDATES / 4


def test_a_trainer_that_is_gone_leaves_nothing_mapped_and_another_may_follow(ranks, trainer):
    r = ranks()
    before = r.greedy("before")
    for turn in range(3):
        one = trainer(r)
        live = r.write(1, (turn + 1) % 2)
        assert one.push(live, anew=True) == TP
        r.api.generate(f"w{turn}", [5, 6, 7], max_tokens=200)
        one.close()
        r.store.push(f"s{turn}", live, "keep")
        assert r.greedy(f"g{turn}") == before
