"""The directory of one running service: its sockets, its config, and the lock that says it runs."""

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import stat
from pathlib import Path
from typing import NoReturn

from weight_manager.whole_file import remove_scratch
from worker.supervisor_messages import GIVEN_UP_FILE

REFRESH_S = 3600.0
"""Between two times that a run directory's files are made young; cleaners of temporary directories count days."""
_LONGEST_NAME = len("/replica-999.sock")
_SOCKET_PATH = 107
"""Longest path of a socket that Linux takes, in bytes."""
_LOCK = "lock"
_CONFIG = "config.json"
_SHARED = "api"
"""Name of the directory below it with what several API processes share."""
_OURS = (
    *("supervisor.sock", "store.sock", "fleet.sock", "replica-*.sock", "device-*.sock", "api-*.sock"),
    *(_CONFIG, "http_url", "push_endpoint", "relay_endpoint", "replicas.json", "apis.json", GIVEN_UP_FILE),
)

_KEPT = (
    *("store.lock", "store-nodes", "weights.json", "version_names.json", "snapshot*"),
    *("adapters", "adapters/*", "replica-keys", "replica-keys/*"),
)
"""What a service has there besides, if it is told of no other place (store.state_dir), and keeps or removes itself."""


def _useless(path: Path, error: OSError) -> OSError:
    return OSError(f"the run directory {path} cannot be used: {error.strerror}; choose another one (--run-dir)")


class AlreadyRunning(RuntimeError):
    """Another supervisor holds this directory; the message names it."""


class RunDir:
    """A claimed run directory (mode 0700). Whatever a predecessor that was killed left in it is removed.

    Such a one has left its lock. Without one, what bears the names that would be removed or written over is somebody
    else's, of a checkpoint or a source tree for instance, and the directory is refused.
    """

    def __init__(self, path: Path) -> None:
        """Claim `path`, making it when needed. Raises AlreadyRunning, or OSError when it cannot be used."""
        if len(os.fsencode(path.absolute())) + _LONGEST_NAME > _SOCKET_PATH:
            most = _SOCKET_PATH - _LONGEST_NAME
            raise OSError(f"{path} is too long for the sockets in it: choose a run directory of at most {most} bytes")
        self.path = path
        try:
            self._fd = self._claim()
            self._clean()
        except OSError as error:
            raise _useless(path, error) if error.errno else error from None

    @property
    def crashes(self) -> Path:
        """Where reports of crashed processes are kept; survives `close`."""
        return self.path / "crashes"

    def close(self) -> None:
        """Remove what was ours, and the directory too when nothing is left (crash reports, the store's history)."""
        self._clean()
        (self.path / _LOCK).unlink(missing_ok=True)
        os.close(self._fd)
        with contextlib.suppress(OSError):  # something is left, or is another's by now, or it was removed under us
            self.path.rmdir()

    def _claim(self) -> int:
        """The descriptor of the lock, held."""
        while True:
            self._make()
            try:
                self._check()
                fd = self._lock()
            except FileNotFoundError:  # its last holder has just removed the directory
                continue
            if fd is not None:
                return fd

    def _make(self) -> None:
        """The directory, where there is none. Raises OSError."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:  # it was a directory until its last holder removed it in between, or it is none
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISDIR(self.path.lstat().st_mode):
                    raise

    def _check(self) -> None:
        """Raises PermissionError for what is not ours to write in."""
        if {self.path.stat().st_uid, self.path.lstat().st_uid} != {os.getuid()}:  # a link to ours may be another's, too
            raise PermissionError(f"{self.path} belongs to another user; choose another run directory")
        lock = self.path / _LOCK
        if lock.exists():  # looked at before the others, as its holder removes it last, and after, as it comes first
            return
        found = [name for name in (_CONFIG, _SHARED) if (self.path / name).exists()]
        if found and not lock.exists() and self._was_a_service_s():
            raise PermissionError(
                f"{self.path} is a service's, and somebody has removed its {_LOCK}, as cleaners of temporary files "
                "do (systemd-tmpfiles): whether the service runs still cannot be told. If it does not, remove the "
                "directory and start again; else choose another one, best below XDG_RUNTIME_DIR (--run-dir)"
            )
        if found and not lock.exists():
            raise PermissionError(
                f"{self.path} has a {' and a '.join(found)} that is no service's, and would be removed: choose a run "
                "directory that holds nothing else (--run-dir)"
            )

    def _was_a_service_s(self) -> bool:
        """Whether its config.json has the parts of a service's."""
        try:
            document = json.loads((self.path / _CONFIG).read_bytes())
        except (OSError, ValueError):
            return False
        return isinstance(document, dict) and {"store", "worker"} <= document.keys()

    async def stay_young(self, *more: str) -> NoReturn:
        """`refresh` now and then, until cancelled."""
        while True:
            self.refresh(*more)
            await asyncio.sleep(REFRESH_S)

    def refresh(self, *more: str) -> None:
        """Make all that is ours young again: cleaners of temporary directories remove what is some days old.

        more: patterns of what is ours, besides.
        """
        for pattern in (_LOCK, *_OURS, *_KEPT, _SHARED, f"{_SHARED}/*", *more):
            for path in self.path.glob(pattern):
                with contextlib.suppress(OSError):  # it goes just then
                    os.utime(path, follow_symlinks=False)

    def _lock(self) -> int | None:
        """None: its holder removed the lock between our open and our flock."""
        lock = self.path / _LOCK
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == lock.stat().st_ino:
                os.ftruncate(fd, 0)
                os.write(fd, str(os.getpid()).encode())
                return fd
        except BlockingIOError:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise AlreadyRunning(
                f"a service already runs in {self.path} (pid {holder}); stop it, or choose another --name, "
                "or --run-dir where one is set"
            ) from None
        except FileNotFoundError:
            pass
        os.close(fd)
        return None

    def _clean(self) -> None:
        for pattern in _OURS:
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)
            remove_scratch(self.path, pattern)
        remove_scratch(self.crashes, "*.txt")
        shutil.rmtree(self.path / _SHARED, ignore_errors=True)
