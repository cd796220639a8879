"""Steps end when their time is up: a simulated machine says how long each took."""

import numpy as np
import pytest

from tests.fake_engine import FakeEngine
from worker.engine.base import EngineSpec, ForwardBatch
from worker.messages import Generate, SamplingParams
from worker.pace import FIRST, LEAST, Pace, attended
from worker.scheduler import Scheduler
from worker.versions import Version

LONG = 1 << 16


class Machine:
    """Takes `token_s` for a token and `cell_s` for each cell attended to, `fixed_s` for a step."""

    def __init__(self, token_s: float, cell_s: float, fixed_s: float = 0.002, noise: float = 0.0) -> None:
        self.token_s, self.cell_s, self.fixed_s, self.noise = token_s, cell_s, fixed_s, noise
        self.random = np.random.default_rng(0)

    def seconds(self, batch: ForwardBatch) -> float:
        cells = sum(attended(int(n), int(end - n)) for n, end in zip(batch.query_lens, batch.context_lens, strict=True))
        exact = self.fixed_s + self.token_s * len(batch.token_ids) + self.cell_s * cells
        return float(exact * (1 + self.noise * self.random.uniform(-1, 1)))


class Replica:
    """A scheduler whose steps take what a machine says."""

    def __init__(self, machine: Machine, bound_s: float = 1.0, max_tokens: int = 1024) -> None:
        spec = EngineSpec(32, LONG, 64, 4 * LONG // 64, ())
        self.machine, self.engine = machine, FakeEngine(spec)
        self.engine.allocate_kv()
        self.engine.bind(self.engine.prepare({"w": np.array([0])}))
        sizes = {"max_batch": 64, "max_tokens_per_step": max_tokens}
        self.scheduler = Scheduler(spec, None, max_step_s=bound_s, prefix_caching=False, **sizes)
        self.steps: list[tuple[list[int], float]] = []
        self.added = 0

    def add(self, length: int, max_tokens: int = 1) -> None:
        self.added += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.scheduler.add(b"api", Generate(f"r{self.added}", [i % 32 for i in range(length)], params))

    def run(self, most: int = 10_000) -> list[tuple[list[int], float]]:
        """Until idle; rows' lengths and seconds of the steps it took."""
        begun = len(self.steps)
        for _ in range(most):
            batch = self.scheduler.schedule(Version(0, 100, ""))
            if batch is None:
                break
            seconds = self.machine.seconds(batch)
            self.steps.append((batch.query_lens.tolist(), seconds))
            self.scheduler.apply(np.zeros((len(batch.logits_rows), 32), np.float32), seconds)
        return self.steps[begun:]


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_no_step_of_a_long_prompt_takes_much_longer_than_the_bound(noise):
    replica = Replica(Machine(5e-4, 1e-7, noise=noise))  # 16 tokens at position 60000: 0.1 s, 1024: 6.7 s
    replica.add(60_000)
    steps = replica.run()
    assert sum(sum(rows) for rows, _ in steps) == 60_000
    assert max(seconds for _, seconds in steps) < 1.0 * (1.2 + 2 * noise)
    # And the time is used: a bound that is kept by crawling would be worth nothing.
    assert np.median([seconds for rows, seconds in steps if sum(rows) < 1024]) > 0.6


def test_a_slow_machine_begins_with_few_tokens():
    replica = Replica(Machine(0.012, 0.0))  # 1024 tokens: 12 s
    replica.add(5000)
    steps = replica.run()
    assert sum(steps[0][0]) == FIRST
    assert max(seconds for _, seconds in steps) < 1.2


def test_many_prompts_share_the_time_of_a_step():
    replica = Replica(Machine(0.01, 0.0))
    replica.add(64)
    replica.run()
    for _ in range(20):
        replica.add(40)
    steps = replica.run()
    assert max(seconds for _, seconds in steps) < 1.2
    assert len(steps) <= 11, "80 tokens of the 100 that fit, at least"


def test_a_machine_that_cannot_keep_the_bound_goes_on_all_the_same():
    replica = Replica(Machine(0.5, 0.0))
    replica.add(200)
    steps = replica.run()
    assert {sum(rows) for rows, _ in steps[1:-1]} == {LEAST}


def test_prompts_that_fit_are_not_cut():
    replica = Replica(Machine(5e-4, 1e-8))
    replica.add(FIRST)
    replica.run()
    for length in (1024, 700, 30, 1024):
        replica.add(length)
        assert [rows for rows, _ in replica.run()] == [[length]]


def test_tokens_that_are_asked_for_do_not_wait_for_a_prompt():
    replica = Replica(Machine(0.01, 1e-7))
    for _ in range(8):
        replica.add(20, max_tokens=400)
    replica.run(most=12)
    replica.add(3000)
    steps = replica.run(most=20)
    assert all(rows[:8] == [1] * 8 for rows, _ in steps)
    assert max(seconds for _, seconds in steps) < 1.3


def test_steps_of_decodes_teach_nothing_of_prompts():
    replica = Replica(Machine(5e-4, 0.0, fixed_s=0.1))  # a token alone: 0.1 s, as 200 together
    replica.add(1024)
    replica.run()
    for _ in range(40):
        replica.add(2, max_tokens=50)
    replica.run()
    replica.add(1024)
    assert [rows for rows, _ in replica.run()] == [[1024]]


def test_a_step_that_was_held_up_once_changes_little():
    pace = Pace(1.0)
    for _ in range(4):
        pace.ran(1024, attended(1024, 0), 0.5)
    before = pace.cost(1024, 0)
    pace.ran(1024, attended(1024, 1024), 30.0)
    assert pace.cost(1024, 0) < 1.5 * before


def test_a_machine_that_became_slower_is_noticed():
    pace = Pace(1.0)
    for speed in (1, 1, 1, 4, 4):
        for start in range(0, 6144, 1024):
            pace.ran(1024, attended(1024, start), speed * (0.1 + 2e-8 * attended(1024, start)))
    assert pace.cost(1024, 3072) == pytest.approx(4 * (0.1 + 2e-8 * attended(1024, 3072)), rel=0.3)


def test_without_a_bound_steps_are_as_long_as_their_tokens():
    replica = Replica(Machine(0.01, 1e-6), bound_s=float("inf"))
    replica.add(3000)
    assert [rows for rows, _ in replica.run()] == [[1024], [1024], [952]]
