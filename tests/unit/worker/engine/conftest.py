"""Engines over tiny checkpoints on disk."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import engine_cases
from tests.engine_cases import ADAPTERS, MODELS, Adapter, Feeder
from worker.config import WorkerConfig
from worker.cpu import native
from worker.engine import paddle_engine
from worker.engine.paddle_engine import PaddleEngine

__all__ = ["ADAPTERS", "MODELS", "Adapter", "Checkpoint", "Feeder"]


class Checkpoint(engine_cases.Checkpoint):
    """One HF directory, and engines over it."""

    def engine(self, *, rank: int = 0, group: Any = None, bound: bool = True, **settings: Any) -> PaddleEngine:
        settings = {"max_batch": 8, "max_model_len": 64, "block_size": 4, "num_blocks": 64} | settings
        config = WorkerConfig(model_dir=self.path, dtype=self.dtype, tp=self.tp, **settings)
        engine = PaddleEngine(config, self.manifest, group, rank)
        engine.allocate_kv()
        if bound:
            engine.bind(engine.prepare(self.views(rank)))
        return engine


@pytest.fixture
def checkpoint() -> Callable[..., Checkpoint]:
    return lambda name, **kw: Checkpoint(MODELS / name, **kw)


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Parametrise indirectly with: native (oneDNN and the compiled attention), mkl (no compiler), paddle."""

    def refuse() -> Path:
        raise OSError("the test says so")

    if request.param == "paddle":
        monkeypatch.setattr(paddle_engine, "why_not", lambda dtype: "the test says so")
    if request.param == "mkl":
        monkeypatch.setattr(native, "compiled", refuse)
        native.load.cache_clear()
    if request.param == "native":
        try:
            native.load()
        except OSError as error:
            pytest.skip(f"no compiled kernel here: {error}")
    yield request.param
    if request.param == "mkl":
        native.load.cache_clear()


@pytest.fixture
def checkpoint_class() -> type[Checkpoint]:
    return Checkpoint


@pytest.fixture
def feeder() -> type[Feeder]:
    return Feeder
