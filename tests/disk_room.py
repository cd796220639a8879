"""A disk that is full for a while: a stand-in for `os.write`."""

import errno
import os

_WRITE = os.write


class DiskRoom:
    """Calls are writes. left: so many bytes still fit, of all files together; what begins after that is refused."""

    def __init__(self, left: int = 0) -> None:
        self.left = left

    def __call__(self, file: int, data: bytes | bytearray | memoryview) -> int:
        """How many bytes were written. Raises OSError when none fits."""
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = _WRITE(file, data[: self.left])
        self.left -= written
        return written
