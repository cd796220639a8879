import logging

import pytest

from rollout_client import copying
from weight_manager.logs import JsonFormatter


@pytest.fixture(autouse=True)
def no_logging_of_a_process():
    """A test may begin what is else a process, and sets up its logging: to the stderr of that test, which is closed
    after it, and whatever thread has something to say in a later one would fail over it.
    """
    root = logging.getLogger()
    level = root.level
    yield
    for handler in root.handlers[:]:
        if isinstance(handler.formatter, JsonFormatter):
            root.removeHandler(handler)
            root.setLevel(level)


@pytest.fixture(params=["compiled", "numpy"])
def way(request, monkeypatch):
    """How weights are moved. Both give the same, to the bit."""
    found = copying.prepare(120) if request.param == "compiled" else None
    if found is None and request.param == "compiled":
        pytest.skip("no C compiler here")
    monkeypatch.setattr(copying, "ready", lambda: found)
