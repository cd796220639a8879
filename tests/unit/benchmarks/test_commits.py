"""What `benchmarks.gpu.commits` makes of the times at which a client's tokens came."""

import pytest

from benchmarks.gpu.commits import judged


def test_gaps_are_compared_with_the_steps_of_their_time() -> None:
    """A step takes twice as long at the end of this round as it did at its begin, and no longer for any commit."""
    mine, pushes, moves, at = [], [], [], 0.0
    for number in range(1000):
        step = 0.002 * (1 + number / 1000)
        commits = number % 50 == 25
        took = 1.1 * step if commits else step
        if commits:
            moves.append((at - 5 * step, at - step))
            pushes.append((at - 6 * step, at + took))
        mine.append((at, at + took, 1, commits))
        at += took
    found = judged(mine, moves, pushes)
    assert found["commits"] == 20
    for share in ("commit_p50", "commit_p90", "commit_p99"):
        assert found[share] == pytest.approx(1.1, abs=0.03)
    assert found["quiet_p99"] == pytest.approx(1.06, abs=0.06)
    assert found["during"] == pytest.approx(1.0, abs=0.02)
