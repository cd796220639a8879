"""Engines over tiny checkpoints on disk."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
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
