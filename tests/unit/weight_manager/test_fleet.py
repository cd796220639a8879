"""The replicas as the store sees them: who is taken in, and when."""

import os

import pytest

from weight_manager.config import StoreConfig
from weight_manager.fleet import Fleet, Standing
from weight_manager.messages import Live, Register, Registered
from weight_manager.metrics import Counters
from weight_manager.watching import Watching

OLD, NEW = Live("run", 1, 1, 0, "a" * 16), Live("run", 2, 2, 1, "b" * 16)


@pytest.fixture
def fleet(tmp_path):
    config = StoreConfig(run_dir=tmp_path, model=tmp_path)
    said = []
    made = Fleet(
        *(config, "layout", "arena"),
        send=lambda peer, message: said.append((peer, message)) or True,
        watching=Watching(),
        counters=Counters(),
        on_gone=lambda number, why: [hear(number, why) for hear in made.gone],
    )
    made.said, made.gone = said, []
    yield made
    made.close()


def test_a_replica_whose_new_life_settles_the_commit_is_taken_in_at_once(fleet):
    """Its old life was the last that the commit waited for: nobody would admit the new one after that."""
    me = [os.getpid()]
    fleet.register(b"old", Register(0, me, "layout"), lambda: Standing(OLD, settled=True), 0.0)
    standing = Standing(OLD, settled=False)

    def gone(number, why):
        nonlocal standing
        standing = Standing(NEW, settled=True)
        fleet.admit_held(NEW, 0.0)

    fleet.gone.append(gone)
    fleet.register(b"new", Register(0, me, "layout"), lambda: standing, 0.0)
    assert [(peer, m.live) for peer, m in fleet.said if isinstance(m, Registered)] == [(b"old", OLD), (b"new", NEW)]
    assert fleet.numbers() == {0}
