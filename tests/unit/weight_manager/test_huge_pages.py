import threading
import time

from weight_manager.huge_pages import HugePages


class Arena:
    """Two slots, of which each piece asks first."""

    slots, slot_bytes = 3, 10

    def __init__(self):
        self.moved = 0

    def backed(self, slot):
        return slot < 2

    def use_huge_pages(self, slot, may_go):
        assert slot < 2
        for _ in range(3):
            if not may_go():
                break
            self.moved += 1
        return self.moved


def test_it_waits_while_a_push_runs_and_ends_with_the_store():
    arena, busy = Arena(), threading.Event()
    busy.set()
    pages = HugePages(arena, busy.is_set)
    pages.start()
    time.sleep(0.3)
    assert arena.moved == 0
    busy.clear()
    end = time.monotonic() + 5
    while arena.moved < 6:
        assert time.monotonic() < end
        time.sleep(0.01)
    pages.close()
    busy.set()
    waiting = HugePages(Arena(), busy.is_set)
    waiting.start()
    waiting.close()
    assert waiting._arena.moved == 0
    HugePages(Arena(), busy.is_set).close()
