"""The directory of one running service: its sockets, its config, and the lock that says it runs."""

import fcntl
import os
import shutil
from pathlib import Path

from worker.supervisor_messages import GIVEN_UP_FILE

_LONGEST_NAME = len("/replica-999.sock")
_SOCKET_PATH = 107
"""Longest path of a socket that Linux takes, in bytes."""
_OURS = (
    *("*.sock", "config.json", "http_url", "push_endpoint", "relay_endpoint"),
    *("replicas.json", "apis.json", GIVEN_UP_FILE),
)


def replace(path: Path, content: bytes) -> None:
    """Write a file of a service, so that whoever reads it sees all of what was there or all of this."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content)
    os.replace(fresh, path)


_SHARED = "api"
"""Name of the directory below it with what several API processes share."""


def _useless(path: Path, error: OSError) -> OSError:
    return OSError(f"the run directory {path} cannot be used: {error.strerror}; choose another one (--run-dir)")


class AlreadyRunning(RuntimeError):
    """Another supervisor holds this directory; the message names it."""


class RunDir:
    """A claimed run directory (mode 0700). Whatever a predecessor that was killed left in it is removed."""

    def __init__(self, path: Path) -> None:
        """Claim `path`, making it when needed. Raises AlreadyRunning, or OSError when it cannot be used."""
        if len(os.fsencode(path.absolute())) + _LONGEST_NAME > _SOCKET_PATH:
            most = _SOCKET_PATH - _LONGEST_NAME
            raise OSError(f"{path} is too long for the sockets in it: choose a run directory of at most {most} bytes")
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = path.stat().st_uid
        except OSError as error:
            raise _useless(path, error) from None
        if owner != os.getuid():
            raise PermissionError(f"{path} belongs to another user; choose another run directory")
        try:
            self._fd = self._lock()
            self._clean()
        except OSError as error:
            raise _useless(path, error) from None

    @property
    def crashes(self) -> Path:
        """Where reports of crashed processes are kept; survives `close`."""
        return self.path / "crashes"

    def close(self) -> None:
        """Remove what was ours, and the directory too when nothing is left (crash reports, the store's history)."""
        self._clean()
        (self.path / "lock").unlink(missing_ok=True)
        os.close(self._fd)
        if self.path.exists() and not any(self.path.iterdir()):  # somebody may have removed it under us
            shutil.rmtree(self.path, ignore_errors=True)

    def _lock(self) -> int:
        lock = self.path / "lock"
        while True:
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                raise AlreadyRunning(
                    f"a service already runs in {self.path} (pid {holder}); stop it, or choose another --name"
                ) from None
            if lock.exists() and os.fstat(fd).st_ino == lock.stat().st_ino:
                os.ftruncate(fd, 0)
                os.write(fd, str(os.getpid()).encode())
                return fd
            os.close(fd)  # its holder removed it between our open and our lock

    def _clean(self) -> None:
        for pattern in _OURS:
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)
        shutil.rmtree(self.path / _SHARED, ignore_errors=True)
