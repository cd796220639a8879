"""Threads that hash a test's arena: compiled ones, or Python's, as where there is no C compiler."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from weight_manager.background import Background


def on_threads(kind: str, monkeypatch: pytest.MonkeyPatch, make: Callable[[Background], Any]) -> Iterator[Any]:
    """What `make` makes, which has an `arena`. kind: "compiled" or "python". The body of a fixture."""
    if kind == "python":
        monkeypatch.setattr("weight_manager.reading.compiled", lambda *_: (_ for _ in ()).throw(OSError("no compiler")))
    background = Background(2, "verify", reads=True)
    background._opening.thread.join(60)
    if (background._opening.reading is not None) != (kind == "compiled"):
        background.close()
        pytest.skip("no C compiler here")
    made = make(background)
    yield made
    background.close()
    made.arena.close(unlink=True)
