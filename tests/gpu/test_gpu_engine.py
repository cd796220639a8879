"""The engine as a rank makes it: its self-test, and a device that computes wrong."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.engine_cases import MODELS, Checkpoint, Feeder
from tests.gpu import gpu_engines
from worker.gpu.backend import GpuDecoder
from worker.gpu.engine import GpuEngine
from worker.gpu.operations import Operations
from worker.gpu.self_test import ComputesWrong

pytestmark = pytest.mark.usefixtures("driver")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "ernie45_moe", "qwen3_moe"])
def test_it_passes_its_self_test_and_serves(family, dtype):
    model = Checkpoint(MODELS / family, dtype=dtype)
    engine = GpuEngine(gpu_engines.worker_config(model), model.layout, 0, 0)
    engine.allocate_kv()
    engine.bind(engine.prepare(model.views()))
    ids = load_file(MODELS / family / "expected.safetensors")["ids"].tolist()

    class Arrays:
        spec = engine.spec

        def forward(self, batch):
            return engine.forward(batch)[:]

    run = Feeder(Arrays(), [ids])
    run.step({0: len(ids)})
    if dtype == "float32":
        expected = load_file(MODELS / family / "expected.safetensors")["logits"]
        np.testing.assert_allclose(run.all_logits(0), expected, atol=3e-5, rtol=0)
    released = engine.release_kv()
    assert released > 0
    engine.bind(None)
    engine.allocate_kv()
    engine.bind(engine.prepare(model.views()))
    again = Feeder(Arrays(), [ids])
    again.step({0: len(ids)})
    np.testing.assert_array_equal(again.all_logits(0), run.all_logits(0))
    engine.bind(None)  # nothing stays pinned: the arrays go


@pytest.mark.parametrize("kernel", ["rms_norm", "gated", "turn", "turn_and_attend", "embed"])
def test_a_device_whose_kernels_do_nothing_is_refused(monkeypatch, kernel):
    launch = Operations._launch
    monkeypatch.setattr(
        Operations, "_launch", lambda self, name, *a, **k: None if name == kernel else launch(self, name, *a, **k)
    )
    model = Checkpoint(MODELS / "llama")
    with pytest.raises(ComputesWrong, match="computes wrong"):
        GpuEngine(gpu_engines.worker_config(model), model.layout, 0, 0)


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_device_that_computes_one_size_of_step_wrong_is_refused(monkeypatch, rows):
    product = Operations.product

    def none_of_some(self, kind, *rest, **more):
        if kind != "ADD" or self.step.rows != rows:
            product(self, kind, *rest, **more)

    monkeypatch.setattr(Operations, "product", none_of_some)
    model = Checkpoint(MODELS / "llama")
    with pytest.raises(ComputesWrong, match="computes wrong"):
        GpuEngine(gpu_engines.worker_config(model, max_batch=64), model.layout, 0, 0)


def test_a_device_whose_logits_are_no_numbers_is_refused(monkeypatch):
    trial = GpuDecoder.trial
    monkeypatch.setattr(GpuDecoder, "trial", lambda *args: np.full_like(trial(*args), np.nan))
    model = Checkpoint(MODELS / "llama")
    with pytest.raises(ComputesWrong, match="off by nan"):
        GpuEngine(gpu_engines.worker_config(model), model.layout, 0, 0)
