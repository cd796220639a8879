import threading
import time

from rollout_client.aligned_map import HUGE
from weight_manager import huge_pages
from weight_manager.huge_pages import HugePages


class Arena:
    """Two slots of three pieces, of which each asks first. stuck: pieces that do not move at first."""

    slots, slot_bytes = 3, 3 * HUGE + 10

    def __init__(self, stuck=0):
        self.moved, self.rounds, self.stuck = 0, [0, 0], stuck

    def backed(self, slot):
        return slot < 2

    def use_huge_pages(self, slot, may_go):
        assert slot < 2
        self.rounds[slot] += 1
        done = 0
        for _ in range(3):
            if not may_go():
                break
            if self.stuck:
                self.stuck -= 1
                break
            self.moved += 1
            done += HUGE
        return done


def until(holds):
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_waits_while_a_push_runs_and_ends_with_the_store():
    arena, busy = Arena(), threading.Event()
    busy.set()
    pages = HugePages(arena, busy.is_set)
    pages.start()
    time.sleep(0.3)
    assert arena.moved == 0
    busy.clear()
    until(lambda: arena.moved >= 6)
    pages.close()
    assert arena.rounds == [1, 1]
    busy.set()
    waiting = HugePages(Arena(), busy.is_set)
    waiting.start()
    waiting.close()
    assert waiting._arena.moved == 0
    HugePages(Arena(), busy.is_set).close()


def test_what_did_not_move_is_tried_again_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(huge_pages, "PAUSES_S", (0.0, 0.01, 0.01, 0.01))
    for stuck, rounds in ((3, 3), (99, 4)):
        arena = Arena(stuck)
        pages = HugePages(arena, lambda: False)
        pages.start()
        pages._thread.join(30)
        assert arena.rounds == [rounds, rounds]


def backed_in_turn(arena, *rounds):
    """Which slots have memory when it is asked round by round, beginning with slot 0."""
    later, now = iter(rounds), set()

    def ask(slot):
        nonlocal now
        if slot == 0:
            now = next(later)
        return slot in now

    arena.backed = ask


def test_slots_come_and_go_between_rounds(monkeypatch):
    monkeypatch.setattr(huge_pages, "PAUSES_S", (0.0, 0.01))
    arena = Arena(99)
    backed_in_turn(arena, {0, 1}, {0})
    pages = HugePages(arena, lambda: False)
    pages.start()
    pages._thread.join(30)
    assert arena.rounds == [2, 1]


def test_the_store_does_not_wait_for_the_next_round(monkeypatch):
    monkeypatch.setattr(huge_pages, "PAUSES_S", (0.0, 100.0))
    arena = Arena(99)
    pages = HugePages(arena, lambda: False)
    pages.start()
    until(lambda: arena.rounds == [1, 1])
    began = time.monotonic()
    pages.close()
    assert time.monotonic() - began < 1


def test_slots_that_are_still_to_come_are_waited_for(monkeypatch):
    """An adapter's other slots get their memory while its first is moved."""
    monkeypatch.setattr(huge_pages, "PAUSES_S", (0.0, 0.01, 0.01))
    arena = Arena()
    backed_in_turn(arena, {0}, {0}, {0, 1})
    pages = HugePages(arena, lambda: False, expected=2)
    pages.start()
    pages._thread.join(5)
    assert arena.rounds == [3, 1]
