"""Address ranges that outlive the memory behind them.

A captured graph holds addresses. Sleep takes the memory away and gives it back to the device, wake puts other memory
behind the same addresses, and every graph goes on as it was.
"""

import logging
import os
import threading

from worker.gpu.driver import CudaError, DeviceMemoryError, Driver

log = logging.getLogger(__name__)


class Region:
    """A reserved range; with memory behind it after `fill`, without after `empty`.

    what: for errors. shared: memory that `lend` can give to another process too, where the system can do that.
    """

    def __init__(self, driver: Driver, nbytes: int, what: str, *, shared: bool = False) -> None:
        self._driver, self._what, self._shared = driver, what, shared
        self.nbytes = -(-max(nbytes, 1) // driver.page) * driver.page
        self.address = driver.reserve(self.nbytes)
        self._handle: int | None = None
        self._descriptor: int | None = None  # of the memory, once it was lent: the driver takes 1 to 2 ms to make one
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
                handle = self._create()
            except DeviceMemoryError:
                raise self._driver.no_room(self.nbytes, self._what) from None
            self._driver.map(self.address, self.nbytes, handle)
            self._handle = handle

    def empty(self) -> int:
        """Give the memory back to the device; bytes given back. Nothing may be running that uses it."""
        with self._lock:
            if self._handle is None:
                return 0
            if self._descriptor is not None:
                os.close(self._descriptor)  # which would keep the memory
                self._descriptor = None
            self._driver.unmap(self.address, self.nbytes, self._handle)
            self._handle = None
            return self.nbytes

    def lend(self) -> int:
        """A file descriptor of the memory behind it, to be sent and closed. Raises CudaError where there is none."""
        with self._lock:
            if self._handle is None or not self._shared:
                raise CudaError(f"no {self._what} that another process could map")
            if self._descriptor is None:
                self._descriptor = self._driver.export(self._handle)
            return os.dup(self._descriptor)

    def _create(self) -> int:
        if self._shared:
            try:
                return self._driver.create(self.nbytes, shared=True)
            except DeviceMemoryError:
                raise
            except CudaError as error:
                log.info("device memory cannot be shared with the store here: %s", error)
                self._shared = False
        return self._driver.create(self.nbytes)
