"""Lines come and go with pushes; the threads that make their memory, read and write it are others'."""

from types import SimpleNamespace

import pytest

from rollout_client.peft import adapter_config, adapter_tensors
from rollout_client.protocol import AdapterPush, Part
from tests.faults.small_model import ADAPTER_CONFIG, LAYOUT, adapter
from weight_manager.adapters.lines import Lines
from weight_manager.config import StoreConfig
from weight_manager.history import History, Record
from weight_manager.messages import Live
from weight_manager.metrics import Counters
from weight_manager.relay.members import Members

PARTS = [Part(name, "float32", value.shape) for name, value in adapter_tensors(adapter(1))]


class Threads:
    """Stands for the store's threads: their work is done when a test says so."""

    def __init__(self):
        self.waiting = []

    def submit(self, work, done, failed):
        self.waiting.append((work, done))

    def work(self):
        while self.waiting:
            work, done = self.waiting.pop(0)
            done(work())


@pytest.fixture
def lines(tmp_path):
    config = StoreConfig(run_dir=tmp_path, model=tmp_path, arena_dir=tmp_path, huge_pages=False)
    history, threads = History(tmp_path / "weights.json", 10), Threads()
    audience = SimpleNamespace(numbers=set, held=lambda: iter(()), send=None, drop=None)
    made = Lines(
        *(config, LAYOUT, history, tmp_path / "adapters"),
        background=threads,
        files=threads,
        counters=Counters(),
        audience=audience,
        members=Members(config, LAYOUT, history=history, lease=None),
        data=lambda slots: None,
        made=lambda path: None,
    )
    yield SimpleNamespace(lines=made, threads=threads, epochs=history, folder=tmp_path / "adapters")
    made.close()


def test_a_line_is_not_closed_under_a_thread_that_works_on_its_memory(lines):
    """A first push that is refused leaves nothing, and its slots are just being made: what the thread does to the
    arena's descriptor would be done to whatever file gets that number next, another arena maybe.
    """
    line = lines.lines.for_push(AdapterPush("policy", adapter_config(ADAPTER_CONFIG)), PARTS)
    assert lines.threads.waiting, "its other slots get their memory ahead of their need"
    lines.lines.tick(1.0)
    assert line.arena.fd >= 0
    assert list(lines.lines.all()) == [line]
    lines.threads.work()
    assert all(line.arena.backed(slot) for slot in range(3))
    lines.lines.tick(2.0)
    assert line.arena.fd < 0
    assert not line.arena.path.exists()
    assert not list(lines.lines.all())


def test_an_adapters_epochs_are_taken_though_the_models_history_was_moved_away(lines):
    """Its file stays: under the same epoch replicas would hold one version for another."""
    line = lines.lines.for_push(AdapterPush("policy", adapter_config(ADAPTER_CONFIG)), PARTS)
    live = Live("run", 3, 70, 0, "d" * 16)
    line.history.commit(live, Record("run", 3, 70, live.digest, 0.0, "push"))
    lines.lines.take_over()
    assert lines.epochs.next_epoch() == 71
