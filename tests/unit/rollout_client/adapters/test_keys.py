"""A store with keys can be pushed to through every adapter, as through a publisher."""

import sys
from types import ModuleType

import pytest

from rollout_client.adapters import verl
from rollout_client.adapters.push import Pusher
from rollout_client.adapters.trl_async import WeightTransfer
from rollout_client.adapters.trl_rollout import rollout_func
from rollout_client.adapters.trl_server import USERS, install

KEYS = "trainer.key"


@pytest.fixture
def trl(monkeypatch):
    """Stands for TRL's two modules, which are not installed here."""
    for name in USERS:
        module = ModuleType(name)
        module.VLLMClient = object
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Pusher(run_id="r", keys=KEYS),
        lambda: WeightTransfer(run_id="r", push_keys=KEYS),
        lambda: rollout_func(run_id="r", push_keys=KEYS),
        lambda: install(run_id="r", push_keys=KEYS),
        lambda: verl.Rollout(run_id="r", keys=KEYS),
    ],
    ids=["Pusher", "WeightTransfer", "rollout_func", "install", "verl"],
)
def test_keys_reach_the_publisher(publishers, monkeypatch, trl, make):
    monkeypatch.setattr(verl, "WeightPublisher", lambda *args, **options: publishers.append((args, options)))
    make()
    (made,) = publishers
    options = made[1] if isinstance(made, tuple) else made.options
    assert options["keys"] == KEYS
