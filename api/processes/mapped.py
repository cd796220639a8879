"""Files in memory through which API processes see each other's numbers."""

import mmap
import os
from pathlib import Path


def mapped(path: Path, size: int) -> mmap.mmap:
    """A file of `size` bytes that every process maps; zeros, when it is new. Raises OSError when there is no room.

    Its room is taken now: a page that cannot be had later ends the process that touches it (SIGBUS), and a disk that
    holds the run directory may be full by then.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    except OSError as error:
        raise OSError(
            f"{path} gets no memory: {error.strerror}; make room there, or choose another --run-dir"
        ) from None
    finally:
        os.close(fd)
