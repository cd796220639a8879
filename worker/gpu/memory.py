"""Address ranges that outlive the memory behind them.

A captured graph holds addresses. Sleep takes the memory away and gives it back to the device, wake puts other memory
behind the same addresses, and every graph goes on as it was.
"""

import threading

from worker.gpu.driver import DeviceMemoryError, Driver


class Region:
    """A reserved range; with memory behind it after `fill`, without after `empty`. what: for errors."""

    def __init__(self, driver: Driver, nbytes: int, what: str) -> None:
        self._driver, self._what = driver, what
        self.nbytes = -(-max(nbytes, 1) // driver.page) * driver.page
        self.address = driver.reserve(self.nbytes)
        self._handle: int | None = None
        self._lock = threading.Lock()

    @property
    def filled(self) -> bool:
        """There is memory behind it."""
        return self._handle is not None

    def fill(self) -> None:
        """Put memory behind it; idempotent. Its contents are anything. Raises DeviceMemoryError in words."""
        with self._lock:
            if self._handle is not None:
                return
            try:
                handle = self._driver.create(self.nbytes)
            except DeviceMemoryError:
                raise self._driver.no_room(self.nbytes, self._what) from None
            self._driver.map(self.address, self.nbytes, handle)
            self._handle = handle

    def empty(self) -> int:
        """Give the memory back to the device; bytes given back. Nothing may be running that uses it."""
        with self._lock:
            if self._handle is None:
                return 0
            self._driver.unmap(self.address, self.nbytes, self._handle)
            self._handle = None
            return self.nbytes
