"""The parts of the life benchmark that need no service."""

from benchmarks.life import ticks


def test_a_tick_is_the_sum_of_its_parts():
    figures = ticks.loop_parts(2, tokens=60)
    assert all(figures[name] > 0 for name in (*ticks.PARTS, "tick"))
    parts = sum(figures[name] for name in ticks.PARTS)
    assert 0.5 * figures["tick"] < parts < 1.2 * figures["tick"]
