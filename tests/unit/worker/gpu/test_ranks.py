"""Ranks that share a model on GPUs, without one: their plan in numpy, and the calls that their engines make."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests import recording_cuda
from tests.engine_cases import MODELS, Checkpoint, Feeder
from weight_manager.families import decoder_spec, manifest_for
from weight_manager.layout import make_layout, rank_views
from worker.config import WorkerConfig
from worker.engine.base import Cuts, EngineSpec, ForwardBatch
from worker.gpu import engine as gpu_engine
from worker.gpu.driver import CudaError
from worker.gpu.peers import FEW
from worker.gpu.ranks import Meeting
from worker.gpu.reference import ReferenceOps, ReferenceRanks, widened
from worker.gpu.self_test import ComputesWrong
from worker.models.decoder import collect, hidden
from worker.models.shard import shard_of
from worker.orders import GroupDead

SERVED = ["llama", "llama_tied_biased", "qwen2", "qwen3", "qwen3_moe", "ernie45_moe"]


class InNumpy:
    """An engine of all ranks in numpy: what the device's self-test is compared with."""

    def __init__(self, family, tp):
        model = Checkpoint(MODELS / family, tp=tp)
        spec = replace(decoder_spec(model.config), mtp=False)
        shards = [shard_of(spec, model.manifest, rank, tp) for rank in range(tp)]
        self.spec = EngineSpec(spec.vocab_size, 64, 4, 64, ())
        self.model, self.ids = spec, list(range(1, 40))
        whole = "model.embed_tokens.weight" in shards[0].whole
        ops = [ReferenceOps(spec, s.heads, s.kv_heads, 64, 64, 4) for s in shards]
        self.ops = ReferenceRanks(ops, None if whole else [s.vocab[0] for s in shards])
        views = [model.views(rank) for rank in range(tp)]
        self.weights = collect(spec, {name: [widened(v[name]) for v in views] for name in views[0]})

    def forward(self, batch):
        self.ops.begin(batch)
        x = hidden(self.ops, self.model, self.weights)
        return self.ops.logits(x, self.weights.norm, self.weights.head, batch.logits_rows)


@pytest.mark.parametrize(
    ("family", "tp"), [*((family, 2) for family in SERVED), ("llama", 4), ("llama_tied_biased", 4)]
)
def test_what_ranks_sum_is_what_one_rank_computes(family, tp):
    """Which rows and columns each holds, what is summed where, biases once, ids that another rank has."""
    found = []
    for ranks in (1, tp):
        engine = InNumpy(family, ranks)
        run = Feeder(engine, [engine.ids, engine.ids[::-1]])
        for counts in ({0: 17}, {0: 1, 1: 9}, {0: 1, 1: 1}):
            run.step(counts)
        found.append(np.concatenate([run.all_logits(0), run.all_logits(1)]))
    np.testing.assert_allclose(found[1], found[0], atol=2e-5, rtol=0)


class Rank:
    """One rank's engine over recorded libraries. blocks: what the other ranks have room for."""

    def __init__(self, monkeypatch, family="qwen3", rank=0, tp=2, dtype="bfloat16", blocks=None, **settings):
        self.recording = recording_cuda.install(monkeypatch, recording_cuda.Recording())
        self.hf = json.loads((MODELS / family / "config.json").read_text())
        if "moe_intermediate_size" in self.hf:
            self.hf["moe_intermediate_size"] = 32  # 8 columns a rank at least
        folder = Path(os.environ["XDG_CACHE_HOME"])
        (folder / "config.json").write_text(json.dumps(self.hf))
        sizes = {"max_batch": 8, "max_model_len": 64, "block_size": 4} | settings
        config = WorkerConfig(model_dir=folder, dtype=dtype, device="gpu", tp=tp, **sizes)
        self.layout = make_layout(manifest_for(self.hf, dtype), tp)
        others = [] if blocks is None else [str(blocks).encode()]
        self.meeting = Meeting(lambda mine: [mine, *others], [os.getpid()] * tp, 30.0)
        self.engine = gpu_engine.GpuEngine(config, self.layout, 0, rank, meeting=self.meeting if tp > 1 else None)
        self.rank, self.slot = rank, bytearray(self.layout.slot_bytes)

    def serve(self):
        self.engine.allocate_kv()
        self.engine.bind(self.engine.prepare(rank_views(self.layout, self.rank, self.slot)))
        self.recording.calls.clear()
        return self

    @property
    def calls(self):
        return [call[0] if call[0] != "kernel" else call[1] for call in self.recording.calls]

    @property
    def collectives(self):
        return self.recording.collectives


@pytest.fixture(autouse=True)
def _as_if_right(monkeypatch, tmp_path):
    """What is read from the recorded device is zeros, which the self-tests refuse."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("require_right", "require_sums"):
        real = getattr(gpu_engine, name)

        def refused(*arguments, real=real):
            with pytest.raises(ComputesWrong):
                real(*arguments)

        monkeypatch.setattr(gpu_engine, name, refused)


def batch_of(counts, rows=None):
    """Sequences of so many first tokens each; logits of the last rows, or of all."""
    ends = np.cumsum(counts)
    tables = np.arange(1, 1 + 16 * len(counts), dtype=np.int32).reshape(len(counts), 16) % 60
    positions = np.concatenate([np.arange(n) for n in counts]).astype(np.int32)
    owner = np.repeat(np.arange(len(counts)), counts)
    return ForwardBatch(
        token_ids=np.arange(1, 1 + ends[-1], dtype=np.int32) % 60,
        positions=positions,
        slots=(tables[owner, positions // 4] * 4 + positions % 4).astype(np.int32),
        query_lens=np.array(counts, np.int32),
        context_lens=np.array(counts, np.int32),
        block_tables=tables,
        logits_rows=(ends - 1 if rows is None else np.arange(rows)).astype(np.int32),
        block_copies=np.zeros((0, 2), np.int32),
    )


STEPS = {
    "one token each": batch_of([1, 1, 1]),
    "prompts": batch_of([5, 9]),
    "a chunk without logits": batch_of([16], rows=0),
    "more rows to score than there is room for": batch_of([60, 60], rows=120),
}


@pytest.mark.parametrize("family", SERVED)
def test_all_ranks_launch_the_same_collectives_in_the_same_order(monkeypatch, family):
    """From the start on: else each waits for the other for ever."""
    ranks = [Rank(monkeypatch, family, rank=rank) for rank in range(2)]
    starts = [rank.collectives for rank in ranks]
    assert starts[0] == starts[1]
    assert len(starts[0]) > 50
    for rank in ranks:
        rank.serve()
    for what, batch in STEPS.items():
        for rank in ranks:
            rank.recording.calls.clear()
            rank.engine.forward(batch)
        assert ranks[0].collectives == ranks[1].collectives, what
        if what != "one token each":  # that one was captured
            assert ranks[0].collectives, what


@pytest.mark.parametrize(
    ("family", "bias"), [("llama", 0), ("llama_tied_biased", 1), ("qwen3_moe", 0), ("ernie45_moe", 0)]
)
def test_one_rank_keeps_the_stream_and_the_biases_and_all_sum_twice_a_layer(monkeypatch, family, bias):
    for rank in range(2):
        shares = Rank(monkeypatch, family, rank=rank).serve()
        layers = shares.hf["num_hidden_layers"]
        shares.engine.forward(batch_of([5, 9]))
        assert shares.calls.count("clear") == (2 * layers if rank else 0)
        assert (shares.calls.count("add_bias") > 0) == (bias and rank == 0)
        width = shares.hf["hidden_size"]
        sums = [("sum_ranks", 14 * width, 7)] * (1 + 2 * layers)  # the embedding's is the first
        columns = shares.hf["vocab_size"] // 2
        assert shares.collectives == [*sums, ("ncclAllGather", 2 * columns, 7)]
        assert "embed" not in shares.calls


def test_a_rank_stands_at_the_end_of_what_it_read_before_its_stream_is_cleared(monkeypatch):
    """The gated product, and experts' norm, read the stream that a rank but the first then gives up."""
    for family in ("qwen3", "ernie45_moe"):
        shares = Rank(monkeypatch, family, rank=1, dtype="float32").serve()
        shares.engine.forward(batch_of([5, 9]))
        calls = [c for c in shares.calls if c in {"rms_norm", "clear", "sum_ranks", "add_experts"}]
        assert "clear" in calls
        for at, call in enumerate(calls):
            if call == "clear":
                until = calls.index("sum_ranks", at)
                assert "rms_norm" not in calls[at:until], family


def test_only_the_first_rank_draws(monkeypatch):
    first, second = (Rank(monkeypatch, rank=rank).serve() for rank in range(2))
    assert second.engine.forward(STEPS["prompts"]) is None
    assert second.engine.forward(STEPS["more rows to score than there is room for"]) is None
    logits = first.engine.forward(STEPS["prompts"])
    drawn = logits.begin(
        np.arange(2),
        np.ones(2, np.float32),
        np.ones(2, bool),
        np.zeros(2),
        Cuts(np.zeros(2, np.int32), np.ones(2), np.zeros(2, np.float32)),
    ).drawn()
    assert len(drawn.tokens) == 2
    scored = first.engine.forward(STEPS["more rows to score than there is room for"])
    assert isinstance(scored, np.ndarray)
    assert scored.shape == (120, first.engine.spec.vocab_size)


def test_what_an_aborted_sum_left_behind_is_taken_for_nothing(monkeypatch):
    """The wait for it ends as any other does: it is the watchdog that says why."""
    rank = Rank(monkeypatch).serve()
    logits = rank.engine.forward(STEPS["prompts"])
    groups = rank.engine._ranks.groups
    groups._abort("the process of rank 1 is gone")
    with pytest.raises(GroupDead, match="rank 1 is gone"):
        logits[:]
    with pytest.raises(GroupDead):
        rank.engine.forward(STEPS["prompts"])
    assert not rank.calls[-1].startswith("nccl")
    assert rank.engine._ranks.peers._ended[0] == 1, "nor do our own sums wait for it"


def test_many_numbers_are_nccls_to_sum_and_so_are_all_where_ranks_cannot_reach_each_other(monkeypatch):
    rank = Rank(monkeypatch, max_batch=8).serve()
    ranks = rank.engine._ranks
    for one, few in ((ranks, "sum_ranks"), (replace(ranks, peers=None), "ncclAllReduce")):
        rank.recording.calls.clear()
        one.sum(1 << 34, FEW, None)
        one.sum(1 << 34, FEW + 8, None)
        assert rank.collectives == [(few, FEW, 7), ("ncclAllReduce", FEW + 8, 7)]
    monkeypatch.setattr(gpu_engine, "PeerSums", _no_way)
    rank = Rank(monkeypatch).serve()
    rank.engine.forward(STEPS["prompts"])
    assert {name for name, *_ in rank.collectives} == {"ncclAllReduce", "ncclAllGather"}


def _no_way(*_):
    raise CudaError("cuIpcOpenMemHandle_v2: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")


def test_tokens_that_are_drawn_go_to_the_other_devices_before_the_step_that_reads_them(monkeypatch):
    ranks = [Rank(monkeypatch, rank=rank).serve() for rank in range(2)]
    first, second = ranks
    batch, told = STEPS["one token each"], []
    first.engine.telling = lambda ahead: told.append((ahead, list(first.calls)))
    for rank in ranks:
        rank.engine.forward(batch)
        rank.recording.calls.clear()
    cuts = Cuts(np.zeros(3, np.int32), np.ones(3), np.zeros(3, np.float32))
    begun = first.engine.forward(batch).begin(np.arange(3), np.ones(3, np.float32), np.ones(3, bool), np.zeros(3), cuts)
    first.recording.calls.clear()
    begun.follow(batch, np.array([2, 0, 1], np.int32))
    ((ahead, before),) = told
    assert ahead is batch
    assert not before, "the others hear of it before anything of it is launched here"
    second.engine.follow(batch)
    assert [call for call in first.calls if call in {"feed", "ncclBroadcast", "cuGraphLaunch"}] == [
        *("feed", "ncclBroadcast", "cuGraphLaunch")
    ]
    assert [call for call in second.calls if call in {"feed", "ncclBroadcast", "cuGraphLaunch"}] == [
        *("ncclBroadcast", "cuGraphLaunch")
    ]
    assert first.collectives == second.collectives == [("ncclBroadcast", 4, 2)]  # int32, the rows of the graph


def test_graphs_go_before_their_communicator_and_come_after_it_fifty_times(monkeypatch):
    rank = Rank(monkeypatch)

    class Paddles:
        up = True

        def shutdown(self):
            was, self.up = self.up, False
            return ["paddle"] if was else []

        def restart(self):
            was, self.up = self.up, True
            return [] if was else ["paddle"]

        def prove(self):
            """Nothing to try."""

    groups = rank.engine.groups(Paddles())
    captured = 2 * len(rank.engine._decoder.sizes)
    for _ in range(50):
        rank.recording.calls.clear()
        assert groups.shutdown() == ["paddle", "tp"]
        assert groups.shutdown() == []
        calls = rank.calls
        assert calls.count("cuGraphExecDestroy") == captured
        assert calls.index("cuStreamSynchronize") < calls.index("cuGraphExecDestroy")
        assert "cuGraphExecDestroy" not in calls[calls.index("ncclCommFinalize") :]
        rank.recording.calls.clear()
        assert groups.restart() == ["paddle", "tp"]
        assert groups.restart() == []
        calls = rank.calls
        assert calls.count("cuGraphInstantiateWithFlags") == captured
        assert "cuStreamBeginCapture_v2" not in calls[: calls.index("ncclCommInitRank")]


def test_all_ranks_have_the_blocks_of_the_one_with_the_least_room(monkeypatch):
    plenty = Rank(monkeypatch).engine.spec.num_blocks
    assert Rank(monkeypatch, blocks=plenty - 5).engine.spec.num_blocks == plenty - 5
    assert Rank(monkeypatch, blocks=plenty + 5).engine.spec.num_blocks == plenty


def test_as_many_devices_as_ranks_are_needed(monkeypatch):
    with pytest.raises(ValueError, match="tp 4 needs as many GPUs, 2 are visible here"):
        Rank(monkeypatch, "llama", tp=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_rank_alone_has_nothing_of_it(monkeypatch, dtype):
    alone = Rank(monkeypatch, "ernie45_moe", tp=1, dtype=dtype)
    made = list(alone.recording.calls)
    alone.serve()
    for batch in STEPS.values():
        alone.engine.forward(batch)
    names = {call[0] for call in [*made, *alone.recording.calls]} | {call[1] for call in made if call[0] == "kernel"}
    assert not {name for name in names if name.startswith("nccl")}
    assert not names & {"embed_part", "clear", "join", "cuEventQuery"}


def test_ranks_that_check_each_other_say_that_they_differ(monkeypatch):
    rank = Rank(monkeypatch, check_ranks=True).serve()
    rank.engine.forward(STEPS["prompts"])
    object.__setattr__(rank.meeting, "gather", lambda mine: [mine, b'"other"'])
    with pytest.raises(RuntimeError, match="hidden states differ"):
        rank.engine.forward(STEPS["prompts"])
