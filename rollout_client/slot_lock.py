"""Who may still write into a slot: open-file-description locks on the slot's byte range of the arena file.

A trainer that writes through shared memory can be stopped in the middle of a copy, lose its lease, and go on
copying when it wakes. The store cannot take a mapping away, so it must know that nobody writes before it
gives the slot to the next session. The kernel keeps that knowledge: every writer holds a shared lock while
its copies run, and the lock goes when the writer lets go, closes the file or dies (in any pid namespace).

 [TRAINER] after `Placement`: `lock_shared`, then compare the slot's write epoch in the arena header with
           `Placement.write_epoch`; different = the slot has moved on, write nothing. Unlock after the last copy.
 [STORE]   before a session may use a slot: `is_free`, then bump the write epoch. A writer that locks later
           sees the new epoch; one that locked earlier makes the slot busy, and another slot is used.
"""

import errno
import fcntl
import os
import struct

_FLOCK = "hhqqi4x"  # struct flock: l_type, l_whence, l_start, l_len, l_pid


def _set(fd: int, kind: int, start: int, length: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def lock_shared(fd: int, start: int, length: int) -> bool:
    """Hold [start, start + length) of this open file as one of its writers; False if the store is taking it."""
    return _set(fd, fcntl.F_RDLCK, start, length)


def unlock(fd: int, start: int, length: int) -> None:
    """Let go; harmless when nothing is held."""
    _set(fd, fcntl.F_UNLCK, start, length)


def is_free(fd: int, start: int, length: int) -> bool:
    """True if no other open file holds the range; fd must be open for writing and is left without a lock."""
    if not _set(fd, fcntl.F_WRLCK, start, length):
        return False
    unlock(fd, start, length)
    return True
