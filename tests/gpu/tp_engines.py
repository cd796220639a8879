"""Engines of ranks that share a model, each in a process with a GPU of its own, and the numpy reference over the same
weights: steps without a loop around them."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from benchmarks.gpu.ranks import meeting
from tests.engine_cases import AdapterTensors, Feeder, in_one_array
from tests.gpu import gpu_engines
from tests.gpu.test_gpu_adapters import _merged, made_up
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout, rank_views, region_views
from worker.config import WorkerConfig
from worker.gpu.engine import GpuEngine
from worker.gpu.ranks import Meeting

COUNTS, ADAPTERS = (1, 5, 17, 70), {1: 16, 2: 8, 3: 64}
"""Sequences of a step; epochs of adapters and their ranks."""


def errors(config, folder, tp):
    """By number of sequences: of each sequence's logits, how far off rank 0 is, by their norm. bfloat16."""
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return meeting(tp, _compute, str(folder), tp, patience_s=10)


def _compute(rank, end, folder, tp):
    def gather(mine):
        end.send(mine)
        return end.recv()

    pids = [int(data) for data in gather(str(os.getpid()).encode())]
    config = json.loads((Path(folder) / "config.json").read_text())
    sizes = {"max_model_len": 512, "num_blocks": 700, "max_batch": 100, "max_tokens_per_step": 1024, "block_size": 16}
    settings = WorkerConfig(model_dir=Path(folder), dtype="bfloat16", device="gpu", tp=tp, **sizes)
    layout = make_layout(manifest_for(config, "bfloat16"), tp)
    engine = GpuEngine(settings, layout, 0, rank, meeting=Meeting(gather, pids, 60.0))
    engine.allocate_kv()
    whole, slot = gpu_engines.random_views(config, "bfloat16"), bytearray(layout.slot_bytes)
    for region, view in zip(layout.regions, region_views(layout, slot), strict=True):
        box = tuple(slice(s, s + n) for s, n in zip(region.start, region.shape, strict=True))
        view[:] = whole[region.name][box].reshape(-1)
    engine.bind(engine.prepare(rank_views(layout, rank, memoryview(slot).toreadonly())))
    references = {0: gpu_engines.Reference(config, whole, engine.spec)}
    for epoch, of_rank in ADAPTERS.items():
        tensors, modules = made_up(config, epoch, of_rank)
        scales = {module.name: module.scale for module in modules}
        adapter = AdapterTensors("a", tensors, scales.__getitem__, "bfloat16")
        extents, flat = in_one_array(adapter.views(SimpleNamespace(manifest=layout.manifest, tp=tp), rank))
        plan = engine.adapters.plan("a", extents, adapter.modules, "bfloat16")
        engine.adapters.get(plan, flat.nbytes)
        engine.adapters.hold(epoch, plan, flat)
        if rank == 0:
            references[epoch] = gpu_engines.Reference(config, whole, engine.spec)
            references[epoch].weights = gpu_engines.weights_of(config, _merged(whole, tensors, modules))
    device = SimpleNamespace(spec=engine.spec, forward=lambda batch: _logits(engine, batch))
    rng, found = np.random.default_rng(1), {}
    for count in COUNTS:
        sequences = [rng.integers(0, config["vocab_size"], n).tolist() for n in rng.integers(40, 100, count)]
        epochs = [i % (len(ADAPTERS) + 1) for i in range(1, count + 1)]
        run = Feeder(device, sequences)
        run.adapters = epochs
        _steps(run)
        if rank:
            continue
        found[count] = []
        for epoch, reference in references.items():
            mine = [i for i, one in enumerate(epochs) if one == epoch][:2]
            if not mine:
                continue
            expected = Feeder(reference, [sequences[i] for i in mine])
            _steps(expected)
            for number, i in enumerate(mine):
                ours, theirs = np.stack(run.logits[i]), np.stack(expected.logits[number])
                off = np.linalg.norm(ours - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)
                found[count].append(float(off.max()))
    end.send(found)


def _logits(engine, batch):
    logits = engine.forward(batch)
    return np.zeros((len(batch.logits_rows), 1), np.float32) if logits is None else logits[:]


def _steps(run):
    """Prompts but for their last tokens, eight at a time, then three decode steps of all."""
    for start in range(0, len(run.sequences), 8):
        some = range(start, min(len(run.sequences), start + 8))
        run.step({i: len(run.sequences[i]) - 4 for i in some}, last_only=True)
    for _ in range(3):
        run.step(dict.fromkeys(range(len(run.sequences)), 1))
