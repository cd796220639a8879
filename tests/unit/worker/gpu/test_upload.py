"""Numbers on their way to a device that is late."""

import ctypes

import numpy as np

from worker.gpu.drawing import _Upload


class LateDriver:
    """Stands for a driver whose stream does nothing until somebody waits for it: others compute on the card."""

    def __init__(self):
        self.queue, self.memory = [], np.zeros(64, np.int32)
        self.arrived = []

    def pinned(self, shape, dtype):
        return np.zeros(shape, dtype)

    def allocate(self, nbytes, what):
        return self.memory.ctypes.data

    def event(self):
        return []

    def stream(self, *, urgent):
        return None

    def wait_event(self, stream, event):
        """There is one stream."""

    def record(self, event, stream):
        event[:] = [len(self.queue)]

    def wait(self, recorded, *, event):
        assert event
        until = recorded.pop() if recorded else 0
        for step in self.queue[:until]:
            step()
        del self.queue[:until]

    def to_device(self, address, source, stream, nbytes):
        self.queue.append(lambda: ctypes.memmove(address, source.ctypes.data, nbytes))
        self.queue.append(lambda: self.arrived.append(self.memory[: nbytes // 4].tolist()))


def test_what_is_sent_next_does_not_change_what_is_still_on_its_way():
    driver = LateDriver()
    upload = _Upload(driver, driver.to_device, None, None, 8)
    for numbers in ([3, 1, 2], [0, 2], [7]):
        upload.begin()(np.array(numbers, np.int32))
        upload.send()
    end = driver.event()
    driver.record(end, None)
    driver.wait(end, event=True)
    assert driver.arrived == [[3, 1, 2], [0, 2], [7]]
