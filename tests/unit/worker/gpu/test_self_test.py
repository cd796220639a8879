"""Which tensors a device's self-test makes up."""

import json
import math
import threading
from dataclasses import fields, is_dataclass
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from tests.engine_cases import MODELS, Checkpoint
from weight_manager.families import decoder_spec, manifest_for
from weight_manager.layout import make_layout
from worker.gpu.operations import Heads
from worker.gpu.ranks import Ranks
from worker.gpu.reference import ReferenceOps, ReferenceRanks, widened
from worker.gpu.self_test import (
    ComputesWrong,
    _batches,
    _first_tokens,
    _names,
    _renamed,
    _short,
    require_right,
    require_sums,
)
from worker.gpu.weights import Tensor, placement
from worker.models.decoder import collect, hidden
from worker.models.shard import shard_of


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "ernie45_moe"])
def test_no_two_of_them_share_memory_and_a_model_can_be_made_of_them(family):
    model = Checkpoint(MODELS / family, dtype="bfloat16")
    spec, chosen = _short(decoder_spec(model.config))
    tensors = placement(model.layout, 0).tensors(1 << 20)
    names = _names(SimpleNamespace(tensors=lambda slot: tensors, element=2), chosen)
    collect(spec, {_renamed(name, chosen): tensor for name, tensor in names.items()})
    spans = sorted((t.address, t.address + 2 * math.prod(t.shape), name) for name, t in names.items())
    for (_, end, before), (start, _, after) in pairwise(spans):
        assert end <= start, f"{before} and {after}"


def test_a_small_vocabulary_has_all_tokens_of_the_steps():
    steps = [*_batches(12, 16, 14), *(_first_tokens(rows, 8, 16, 14) for rows in (1, 8, 64))]
    assert max(step.token_ids.max() for step in steps) < 14
    assert len(np.unique(_first_tokens(64, 8, 16, 14).token_ids)) > 4


class Together:
    """The memory of all ranks' devices, and a step of all of them: computed once all have come to it, in numpy."""

    def __init__(self, config, tp, dtype="float32", wrong=None):
        self.config, self.dtype, self.tp = config, dtype, tp
        self.layout = make_layout(manifest_for(config, dtype), tp)
        self.turn, self.trees, self.memory = threading.Barrier(tp, timeout=30), [None] * tp, [{} for _ in range(tp)]
        self.wrong, self.found = wrong, None
        self.spec = decoder_spec(config)
        self.shards = [shard_of(self.spec, self.layout.manifest, rank, tp) for rank in range(tp)]
        self.ranks = None

    def step(self, rank, batch, spec, weights):
        self.trees[rank] = weights
        if self.turn.wait() == 0:
            self.ranks = self.ranks or self._made(spec)
            self.ranks.begin(batch)
            all_ = self._lists(self.trees)
            if self.wrong:
                self.wrong(self.ranks)
            self.found = self.ranks.logits(hidden(self.ranks, spec, all_), all_.norm, all_.head, batch.logits_rows)
        self.turn.wait()
        return self.found

    def _made(self, spec):
        whole = "model.embed_tokens.weight" in self.shards[0].whole
        ops = [ReferenceOps(spec, s.heads, s.kv_heads, 64, 64, 4) for s in self.shards]
        return ReferenceRanks(ops, None if whole else [s.vocab[0] for s in self.shards])

    def _lists(self, trees):
        first = trees[0]
        if isinstance(first, Tensor):
            return [widened(self.memory[r][tree.address]).reshape(tree.shape) for r, tree in enumerate(trees)]
        if isinstance(first, tuple):
            return tuple(self._lists(each) for each in zip(*trees, strict=True))
        if is_dataclass(first):
            return type(first)(**{f.name: self._lists([getattr(t, f.name) for t in trees]) for f in fields(first)})
        return first


class Device:
    """One rank's decoder, as the self-test sees it."""

    block_size, num_blocks, max_len, sizes, device_name = 4, 64, 64, (1, 2, 8), "a device of paper"

    def __init__(self, together, rank):
        shard = together.shards[rank]
        self.together, self.rank, self.spec = together, rank, together.spec
        self.element = 4 if together.dtype == "float32" else 2
        self.heads = Heads(shard.heads, shard.kv_heads, self.spec.head_dim)
        self.ranks = Ranks(tuple(together.shards), rank, None)
        self.where = placement(together.layout, rank)

    def tensors(self, slot):
        return self.where.tensors(1 << 20)

    def put(self, address, values):
        self.together.memory[self.rank][address] = values

    def trial(self, batch, spec, weights):
        return self.together.step(self.rank, batch, spec, weights)


def said(together):
    """What each rank's self-test says; None: it passes."""
    results = [None] * together.tp

    def run(rank):
        try:
            require_right(Device(together, rank))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(together.tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def of(family, **changes):
    return json.loads((MODELS / family / "config.json").read_text()) | changes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("config", "tp"),
    [
        (of("llama"), 2),
        (of("llama_tied_biased"), 4),
        (of("qwen2", vocab_size=97), 2),  # which no two ranks divide
        (of("qwen3", vocab_size=2000), 2),  # of which each rank's first rows are taken
        (of("ernie45_moe"), 2),
    ],
    ids=lambda value: str(value.get("model_type")) if isinstance(value, dict) else str(value),
)
def test_ranks_that_share_a_model_make_up_the_same_one_and_pass(config, tp, dtype):
    together = Together(config, tp, dtype)
    assert said(together) == [None] * tp


def _drop_a_sum(ranks):
    ranks.add_projected = lambda x, y, linear, norm=None: [
        one + h @ w.T for one, h, w in zip(x, y, linear.weight, strict=True)
    ]


def _ids_of_the_first_only(ranks):
    ranks._lows = [0 for _ in ranks._lows]


def _rows_of_the_second_are_others(ranks):
    ranks._lows = [ranks._lows[0], ranks._lows[1] + 1]


def _bias_of_all(ranks):
    real = ranks.add_projected

    def twice(x, y, linear, norm=None):
        found = real(x, y, linear, norm)
        return found if linear.bias is None else [one + linear.bias[0] for one in found]

    ranks.add_projected = twice


@pytest.mark.parametrize("wrong", [_drop_a_sum, _ids_of_the_first_only, _rows_of_the_second_are_others, _bias_of_all])
def test_ranks_that_do_not_compute_one_model_are_refused_all_of_them(wrong):
    done = []

    def once(ranks):
        if not done:
            wrong(ranks)
            done.append(True)

    together = Together(of("llama_tied_biased"), 2, wrong=once)
    assert [type(error) for error in said(together)] == [ComputesWrong] * 2


class Sums:
    """A driver and a group in which rank 0 of 2 is alone: the other rank's numbers are as they should be."""

    def __init__(self, wrong=""):
        self.memory, self.wrong, self.used, self.dropped = {}, wrong, 0, False
        self.summed = set()  # what all ranks have alike by now

    def enter(self): ...
    def stream(self): ...
    def wait(self, stream): ...
    def launched(self, stream): ...

    name = "a device of paper"

    @property
    def groups(self):
        return self

    rank, shards = 0, (None, None)

    def sum(self, address, count, stream):
        if self.wrong != "sum":
            there = self.memory[address]
            there[:count] = 2 * there[:count] + (1000 if address not in self.summed else 0)
            self.summed.add(address)

    def under_way(self):
        return threading.Lock()  # anything to enter and leave

    def allocate(self, nbytes, what):
        self.used += 1
        self.memory[self.used] = np.zeros(nbytes // 4, np.float32)
        return self.used

    def to_device(self, address, values, stream):
        self.memory[address] = values.copy()
        self.summed.discard(address)

    def to_host(self, target, address, stream):
        target[...] = self.memory[address].reshape(target.shape)

    def captured(self, stream, launches):
        return launches

    def launch(self, graph, stream):
        if self.wrong != "graph":
            graph()

    def drop(self, graph):
        self.dropped = True

    def all_gather(self, source, target, count, dtype, stream):
        own = self.memory[source]
        self.memory[target] = np.concatenate([own, own + 1000] if self.wrong != "order" else [own + 1000, own])

    def broadcast(self, address, count, dtype, stream):
        if self.wrong == "told":
            self.memory[address] = self.memory[address] + 1


def test_known_numbers_are_summed_gathered_and_told_before_anything_else():
    right = Sums()
    require_sums(right, right)
    assert right.dropped, "NCCL waits for graphs that hold its communicator"
    for wrong in ("sum", "order", "told", "graph"):
        broken = Sums(wrong)
        with pytest.raises(ComputesWrong, match="sums over the ranks' GPUs are wrong"):
            require_sums(broken, broken)
