"""Engines over tiny checkpoints on disk."""

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from tests import engine_cases, family_cases
from tests.engine_cases import ADAPTERS, MODELS, Adapter, Feeder
from tests.random_tensors import random_tensors
from weight_manager.families import manifest_for
from worker.config import WorkerConfig
from worker.cpu import native
from worker.engine import paddle_engine
from worker.engine.paddle_engine import PaddleEngine

__all__ = ["ADAPTERS", "MODELS", "Adapter", "Checkpoint", "Feeder"]


class Checkpoint(engine_cases.Checkpoint):
    """One HF directory, and engines over it."""

    def engine(self, *, rank: int = 0, sums: Any = None, bound: bool = True, **settings: Any) -> PaddleEngine:
        settings = {"max_batch": 8, "max_model_len": 64, "block_size": 4, "num_blocks": 64} | settings
        config = WorkerConfig(model_dir=self.path, dtype=self.dtype, tp=self.tp, **settings)
        engine = PaddleEngine(config, self.manifest, sums, rank)
        engine.allocate_kv()
        if bound:
            engine.bind(engine.prepare(self.views(rank)))
        return engine


@pytest.fixture
def checkpoint() -> Callable[..., Checkpoint]:
    return lambda name, **kw: Checkpoint(MODELS / name, **kw)


@contextlib.contextmanager
def _computing_with(kernels: str) -> Iterator[None]:
    """Engines made here have these kernels: native (oneDNN and the compiled attention), mkl (no compiler), paddle."""

    def refuse() -> Path:
        raise OSError("the test says so")

    with pytest.MonkeyPatch.context() as patch:
        if kernels == "paddle":
            patch.setattr(paddle_engine, "why_not", lambda dtype: "the test says so")
        if kernels == "mkl":
            patch.setattr(native, "compiled", refuse)
            native.load.cache_clear()
        yield
    if kernels == "mkl":
        native.load.cache_clear()


@pytest.fixture
def computing_with() -> Callable[[str], AbstractContextManager[None]]:
    return _computing_with


_WIDTHS = {
    "head_dim": 16,
    "moe_intermediate_size": 64,
    "intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 96,
}


@pytest.fixture
def mixture(tmp_path: Path) -> Callable[..., Checkpoint]:
    """A random model of a family with experts, all of whose widths are multiples of 16, also over two ranks."""

    def made(family: str, **kw: Any) -> Checkpoint:
        config = family_cases.family_cases(family)[0].config
        config |= {name: width for name, width in _WIDTHS.items() if name in config} | {"hidden_size": 64}
        (tmp_path / "config.json").write_text(json.dumps(config))
        shapes = {p.name: p.shape for p in manifest_for(config, "float32").parameters}
        save_file(random_tensors(shapes, 3), tmp_path / "model.safetensors")
        return Checkpoint(tmp_path, **kw)

    return made


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Parametrise indirectly with what `computing_with` takes."""
    if request.param == "native":
        try:
            native.load()
        except OSError as error:
            pytest.skip(f"no compiled kernel here: {error}")
    with _computing_with(request.param):
        yield request.param


@pytest.fixture
def checkpoint_class() -> type[Checkpoint]:
    return Checkpoint


@pytest.fixture
def feeder() -> type[Feeder]:
    return Feeder
