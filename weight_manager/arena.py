"""The arena: persistent, prefaulted shared memory for whole versions. The store owns it, ranks read it.

Two slots have memory from the start. A spare slot exists in the file but has none until `back` gives it
some; it stands in while a trainer that lost its lease may still be writing into another slot. The owner
holds an exclusive flock, so an arena whose lock is free belongs to nobody and is swept away; a store that
restarts adopts its old arena instead, with the mappings of all ranks still good.
"""

import ctypes
import errno
import fcntl
import os
import re
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

from rollout_client import slot_lock
from rollout_client.aligned_map import HUGE, collapse
from rollout_client.arena_file import (
    HEADER_BYTES,
    MAX_SLOTS,
    NONCE_BYTES,
    ArenaFile,
    file_bytes,
    fixed_header,
    slot_offset,
)
from rollout_client.errors import ArenaError
from weight_manager.errors import StartError

_LEASE_WORD = 5
_BACKED_WORD, _EPOCH_WORD, _SLOT_WORDS = 9, 8, 8
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_MIB = 1 << 20
_COLLAPSED = 64 * _MIB
"""Bytes that are moved into huge pages by one call of the kernel."""


class ArenaReader(ArenaFile):
    """A rank's view: mapped PROT_READ, so a stray in-place write is a crash and not a torn weight."""

    def __init__(self, path: str | Path) -> None:
        """Opens `path` and maps every slot that has memory, so that no flip pays for page tables."""
        super().__init__(path)
        try:
            for slot in range(self.slots):
                if self.backed(slot):
                    self.slot(slot)
        except BaseException:
            self.close()
            raise


class Arena(ArenaFile):
    """The owner's handle. Made by `create` or `adopt`; `slot(i)` is writable."""

    def __init__(self, path: Path, fd: int | None = None) -> None:
        self._moving = threading.Lock()  # a slot is not taken away while a piece of it moves into huge pages
        super().__init__(path, write=True, write_header=True, fd=fd)
        if not _lock(self.fd):
            self.close()
            raise ArenaError(f"{path} is in use by another store")

    @classmethod
    def create(
        cls, directory: Path, name: str, slot_bytes: int, *, slots: int = 2, spare: int = 1, max_fraction: float = 0.95
    ) -> "Arena":
        """New arena ``paddle-rollout-<name>-<nonce>.arena`` with every page of `slots` slots in memory.

        max_fraction: the most of the free space of `directory` that it may take.
        Raises StartError if it does not fit or may not be made, saying what to change.
        """
        assert 0 < slots + spare <= MAX_SLOTS
        assert slot_bytes % HEADER_BYTES == 0
        nonce = secrets.token_bytes(NONCE_BYTES)
        path = directory / f"paddle-rollout-{name}-{nonce.hex()}.arena"
        backed = HEADER_BYTES + slots * slot_bytes
        _check_space(directory, backed, max_fraction)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartError(f"arena_dir {directory} cannot be used: {error.strerror}") from error
        try:
            locked = _lock(fd)  # at once: an unlocked arena is swept by whoever sees it
            os.ftruncate(fd, file_bytes(slots + spare, slot_bytes))
            for start, length in ((0, HEADER_BYTES), *((slot_offset(i, slot_bytes), slot_bytes) for i in range(slots))):
                os.posix_fallocate(fd, start, length)
            os.pwrite(fd, fixed_header(nonce, slot_bytes, slots + spare), 0)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            if error.errno == errno.ENOSPC:
                raise StartError(_no_space(directory, backed)) from error
            hint = ": raise the limit of a file's size (ulimit -f)" if error.errno == errno.EFBIG else ""
            raise StartError(f"the weight arena cannot be made in {directory}: {error.strerror}{hint}") from error
        arena = cls(path, fd)
        if not locked or not path.exists():
            arena.close()
            raise StartError(f"{path} was removed by another store of the same name while it was made")
        for slot in range(slots):
            arena._words[_BACKED_WORD + _SLOT_WORDS * slot] = 1
            arena.slot(slot)
        return arena

    @classmethod
    def adopt(cls, path: Path) -> "Arena":
        """Take over the arena of a store that died. Raises ArenaError if it is none, or still owned."""
        arena = cls(path)
        try:
            for slot in range(arena.slots):
                if arena.backed(slot):
                    arena.slot(slot)  # mapped now, and not when a push begins and others wait for the loop
        except BaseException:
            arena.close()
            raise
        return arena

    def bump(self, slot: int) -> int:
        """Move the write epoch: call before anybody may write into the slot. Returns the new epoch."""
        self._words[_EPOCH_WORD + _SLOT_WORDS * slot] += 1
        return self.write_epoch(slot)

    def lease(self, until_ns: int) -> None:
        """Let ranks serve until then, in ns of CLOCK_MONOTONIC; 0 = for ever, 1 = not now."""
        self._words[_LEASE_WORD] = until_ns

    @property
    def needs_lease(self) -> bool:
        """Whether ranks must look at a lease."""
        return bool(self._words[_LEASE_WORD])

    def writers_gone(self, slot: int) -> bool:
        """True if no trainer can still be writing into the slot through a mapping of its own."""
        return slot_lock.is_free(self.fd, self.slot_offset(slot), self.slot_bytes)

    def back(self, slot: int) -> None:
        """Give the slot memory (idempotent). Raises ArenaError naming the space that is missing."""
        if self.backed(slot):
            return
        try:
            os.posix_fallocate(self.fd, self.slot_offset(slot), self.slot_bytes)
        except OSError as error:
            self._punch(slot)
            if error.errno == errno.ENOSPC:
                raise ArenaError(_no_space(self.path.parent, self.slot_bytes)) from error
            raise
        with self._moving:
            self._words[_BACKED_WORD + _SLOT_WORDS * slot] = 1
            self.slot(slot)

    def release(self, slot: int) -> None:
        """Give the slot's memory back to the system. Nobody may read it any more."""
        with self._moving:
            self._words[_BACKED_WORD + _SLOT_WORDS * slot] = 0
            self._maps.pop(slot, None)
            self._punch(slot)

    def use_huge_pages(self, slot: int, may_go: Callable[[], bool]) -> int:
        """Move a slot into huge pages, as far as there are any; how many bytes are. Slow: run it in a thread.

        Others may map, read, write and release the slot meanwhile. may_go: asked before each piece; False = give up.
        """
        done, size = 0, int(self.slot_bytes)
        if self.slot_offset(slot) % HUGE:
            return 0
        for start in range(0, size - HUGE + 1, _COLLAPSED):
            if not may_go():
                break
            with self._moving:
                if not self.backed(slot) or not collapse(self.slot(slot)[start : start + _COLLAPSED]):
                    break
            done = min(start + _COLLAPSED, size // HUGE * HUGE)
        return done

    def unlink(self) -> None:
        """Remove the file; processes that map it keep what they see."""
        self.path.unlink(missing_ok=True)

    def close(self, *, unlink: bool = False) -> None:
        """Let the arena go. unlink: also remove the file."""
        if unlink and self.fd >= 0:
            self.unlink()
        super().close()

    def _punch(self, slot: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        args = (
            ctypes.c_int(self.fd),
            _PUNCH_HOLE,
            ctypes.c_int64(self.slot_offset(slot)),
            ctypes.c_int64(self.slot_bytes),
        )
        if libc.fallocate(*args) != 0:
            raise OSError(ctypes.get_errno(), f"cannot release slot {slot} of {self.path}")


def in_memory(directory: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether what lies there is gone when the machine restarts; False where it cannot be known."""
    try:
        device = directory.stat().st_dev
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = {line[line.index("-") + 1] for line in lines if len(line) > 2 and line[2] == number and "-" in line}
    return bool(kinds) and kinds <= {"tmpfs", "ramfs"}


def sweep(directory: Path, name: str) -> list[Path]:
    """Remove arenas of this service name that no store owns; returns them. Adopt first, then sweep."""
    swept = []
    pattern = re.compile(rf"paddle-rollout-{re.escape(name)}-[0-9a-f]{{{2 * NONCE_BYTES}}}\.arena")
    for path in directory.iterdir():
        if not pattern.fullmatch(path.name):
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, or not ours to touch
        try:
            if _lock(fd):
                path.unlink(missing_ok=True)
                swept.append(path)
        finally:
            os.close(fd)
    return swept


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_space(directory: Path, needed: int, max_fraction: float) -> None:
    try:
        stat = os.statvfs(directory)
    except OSError as error:
        raise StartError(f"arena_dir {directory} cannot be used: {error.strerror}") from error
    if needed > stat.f_bavail * stat.f_frsize * max_fraction:
        raise StartError(_no_space(directory, needed))


def _no_space(directory: Path, needed: int) -> str:
    stat = os.statvfs(directory)
    free, total = (n * stat.f_frsize for n in (stat.f_bavail, stat.f_blocks))
    enough = -(-(total - free + needed) * 11 // 10 // _MIB)
    return (
        f"the weight arena needs {_mib(needed)} in {directory}, which has {_mib(free)} free of {_mib(total)}. "
        f"In a container give it at least {enough} MiB (docker run --shm-size {enough}m, compose shm_size, "
        f"a Kubernetes emptyDir with medium: Memory); elsewhere remount {directory} with a larger size or set arena_dir"
    )


def _mib(count: int) -> str:
    return f"{count / _MIB:.1f} MiB"
