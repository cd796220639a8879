"""Files that are replaced whole: whoever reads one sees all of what was there or all of what is there now."""

import ctypes
import logging
import os
import secrets
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

log = logging.getLogger(__name__)

_LIFE = secrets.token_hex(3)
"""Tells processes of one number apart: containers that share a folder count their own."""


def write_atomically(path: Path, content: bytes, *, synced: bool = True) -> None:
    """Replace a file as a whole: after a crash at any moment it holds the old bytes or the new ones.

    synced: also after a crash of the machine. Else what it held before may stay beside it, as its scratch.
    Raises OSError, then it holds the old ones. A directory that cannot be synced is logged only: the new bytes are what
    everybody reads from then on, and a machine that loses power may come back with the old ones.
    """
    if not synced:
        write_beside(path, content, synced=False)
        put_in_place(path, synced=False)
        return
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)  # first: after the replacement nothing may fail
    try:
        write_beside(path, content)
        put_in_place(path)
        _sync(directory, path)
    finally:
        os.close(directory)


def replace_file(path: Path, content: bytes) -> None:
    """The same, not synced, and with nothing left beside it. Raises OSError, then it is as it was."""
    write_beside(path, content, synced=False)
    put_in_place(path)


def write_beside(path: Path, content: bytes, *, synced: bool = True) -> None:
    """Write what `put_in_place` gives the file's name, and sync it.

    Raises OSError that names the file, then nothing is left of what was written.
    """
    scratch = scratch_of(path)
    try:
        file = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(file, left) :]
            os.ftruncate(file, len(content))
            if synced:
                os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        error.filename = str(path)  # a write names none, and who makes room has to know where
        scratch.unlink(missing_ok=True)
        raise


def put_in_place(path: Path, *, synced: bool = True) -> None:
    """Replace the file by what was written beside it. Raises OSError, then it is as it was.

    Of a file that is renamed over another ext4 begins to write the bytes to the disk at once, and the rename waits:
    0.6 ms, and 3 while others use the disk. So two that are not synced change names, and nothing is written. Neither is
    removed or made anew, which costs as much again, while everybody waits for a commit: the next is written over the
    old one.
    """
    scratch = scratch_of(path)
    try:
        if synced or not _exchanged(scratch, path):
            scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def sync_directory(path: Path) -> None:
    """Have a file that was replaced outlive the machine's power under its name."""
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        log.error("%s is written, but may be lost with the machine's power: %s", path, error)
        return
    try:
        _sync(directory, path)
    finally:
        os.close(directory)


def _sync(directory: int, path: Path) -> None:
    try:
        os.fsync(directory)
    except OSError as error:
        log.error("%s is written, but may be lost with the machine's power: %s", path, error)


def scratch_of(path: Path) -> Path:
    """What this process writes before it takes the place of `path`; or `path` had before, of what is not synced."""
    return path.with_name(f".{path.name}.{os.getpid()}-{_LIFE}")


def remove_scratch(folder: Path, name: str) -> None:
    """Remove what processes that died while they wrote have left of files of this name (a pattern), as large as those,
    and one more with each death.
    """
    for scratch in folder.glob(f".{name}.*"):
        try:
            scratch.unlink(missing_ok=True)
        except OSError as error:
            log.error("%s could not be removed: %s", scratch, error)


def _exchanged(scratch: Path, path: Path) -> bool:
    """Have two files that are there change names; False where that cannot be done."""
    rename = _renameat2()
    return rename is not None and not rename(_HERE, os.fsencode(scratch), _HERE, os.fsencode(path), _EXCHANGE)


_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux."""


@lru_cache(maxsize=1)
def _renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    """The C library's call; None where it has none."""
    return getattr(ctypes.CDLL(None), "renameat2", None)
