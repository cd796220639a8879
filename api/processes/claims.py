"""Which process runs the request of an id: a symbolic link per id, whose making is atomic and whose target says who.

A client that repeats an id has to find the request that runs, whichever process its second connection came to.
"""

import contextlib
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

log = logging.getLogger(__name__)


class Claims:
    """Those of process `index`; what a predecessor that has died left is removed."""

    def __init__(self, directory: Path, index: int) -> None:
        self._path = directory / "claims"
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._index = str(index)
        self._held: Counter[str] = Counter()
        for link in self._path.iterdir():
            if _target(link) == self._index:
                link.unlink(missing_ok=True)

    @contextlib.contextmanager
    def claimed(self, ids: Sequence[str]) -> Iterator[int | None]:
        """None: they are this process's for the time of the context. A number: one of them is that process's."""
        taken: list[str] = []
        try:
            owner = None
            for name in dict.fromkeys(map(_name, ids)):
                owner = self._claim(name)
                if owner is not None:
                    break
                taken.append(name)
            if owner is not None:
                self._release(taken)
                taken = []
            yield owner
        finally:
            self._release(taken)

    def _claim(self, name: str) -> int | None:
        if name not in self._held:
            while True:
                try:
                    os.symlink(self._index, self._path / name)
                    break
                except FileExistsError:
                    owner = _target(self._path / name)
                    if owner and owner != self._index:
                        return int(owner)
                    if owner:
                        break  # ours, of a request that is being let go
                except OSError as error:  # a full disk: it runs here, and what repeats it elsewhere may, too
                    log.warning("the id of a request cannot be written down: %s", error)
                    break
        self._held[name] += 1
        return None

    def _release(self, names: Sequence[str]) -> None:
        for name in names:
            self._held[name] -= 1
            if self._held[name] <= 0:
                del self._held[name]
                (self._path / name).unlink(missing_ok=True)


def _name(request_id: str) -> str:
    return hashlib.blake2b(request_id.encode(errors="surrogatepass"), digest_size=20).hexdigest()


def _target(link: Path) -> str:
    """The number in a link; "" if it has just gone."""
    try:
        return os.readlink(link)
    except OSError:
        return ""
