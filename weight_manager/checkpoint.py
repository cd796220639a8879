"""Reads the headers of an HF checkpoint directory: which tensor lies where in which safetensors file.

safetensors: u64 header length, JSON header {name: {dtype, shape, data_offsets}}, then the data. Nothing is
executed and every offset is checked against the file before anything is read.
"""

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from rollout_client.protocol import Part
from weight_manager.errors import CheckpointError
from weight_manager.layout import ITEMSIZE

DTYPES: Mapping[str, str] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
MAX_HEADER = 100 << 20
PIECE = 16 << 20
"""Bytes read at a time; so many that a disk is as fast as with more."""
_WEIGHTS = frozenset((".safetensors", ".bin", ".pt", ".pth", ".pdparams", ".gguf"))
"""Endings of files that somebody may take for a checkpoint's weights."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class Tensor:
    """One tensor in a file. offset: bytes from the start of the file."""

    part: Part
    file: "TensorFile"
    offset: int
    nbytes: int


class TensorFile:
    """An open safetensors file. It is read, not mapped: a file cut short meanwhile is an error and not a SIGBUS."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError naming the file."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        info = os.fstat(self._fd)
        self.size = info.st_size
        if stat.S_ISREG(info.st_mode) and is_pointer(path):
            self.close()
            raise CheckpointError(f"{path} {POINTER}")
        if not stat.S_ISREG(info.st_mode) or self.size < 8:
            self.close()
            raise CheckpointError(f"{path} is no safetensors file: not a regular file, or too short")

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the header, in the file's order."""
        length = int.from_bytes(self._bytes(8, 0), "little")
        start = 8 + length
        if length > MAX_HEADER or start > self.size:
            raise CheckpointError(f"{self.path}: its header claims {length} bytes")
        try:
            header: dict[str, Any] = json.loads(self._bytes(length, 8))
            header.pop("__metadata__", None)
            entries = msgspec.convert(header, dict[str, _Entry])
        except (ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: its header is not a safetensors header: {error}") from error
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            dtype = DTYPES.get(entry.dtype, entry.dtype)
            first, stop = entry.data_offsets
            nbytes = prod(entry.shape) * ITEMSIZE.get(dtype, 0)
            fits = 0 <= first <= stop <= self.size - start and min(entry.shape, default=1) >= 0
            if not fits or (dtype in ITEMSIZE and stop - first != nbytes):
                message = f"{self.path}: {name} claims bytes {first} to {stop} of {self.size - start}"
                raise CheckpointError(f"{message} for {entry.dtype} of shape {entry.shape}", [name])
            yield Tensor(Part(name, dtype, entry.shape), self, start + first, stop - first)

    def read_into(self, buffer: memoryview, offset: int, goes_on: Callable[[int], None] = lambda _: None) -> None:
        """Fill a buffer of bytes from the file. goes_on: told how many more were read, after each piece, and may raise.

        Raises CheckpointError when the file ends before.
        """
        while buffer:
            try:
                count = os.preadv(self._fd, [buffer[:PIECE]], offset)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{self.path} was cut short while it was read")
            buffer, offset = buffer[count:], offset + count
            goes_on(count)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _bytes(self, count: int, offset: int) -> bytes:
        buffer = bytearray(count)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)


class Checkpoint:
    """The tensors of a directory, its files open until it is closed. Use as a context manager.

    tensors: of the files that the index names, or of the single file. beside: of a single file that an index passes
    over. Raises CheckpointError naming file and tensor, also for an index that its files do not bear out.
    """

    def __init__(self, directory: Path) -> None:
        paths, index = weight_files(directory), read_index(directory)
        single = directory / SINGLE
        self._files: list[TensorFile] = []
        try:
            self.tensors = [tensor for path in paths for tensor in self._open(path)]
            self.beside = list(self._open(single)) if single not in paths and single.is_file() else []
            held = {(tensor.file.path.name, tensor.part.name) for tensor in self.tensors}
            wrong = sorted(name for name, file in index.items() if (file, name) not in held)
            if wrong:
                raise CheckpointError(
                    f"{directory / INDEX} says that {index[wrong[0]]} holds {wrong[0]}, and it does not "
                    f"({len(wrong)} such tensors)",
                    wrong,
                    code="missing_tensor",
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.pop().close()

    def _open(self, path: Path) -> Iterator[Tensor]:
        self._files.append(TensorFile(path))
        return self._files[-1].tensors()


POINTER = "is a Git LFS pointer, not the file that it stands for: run `git lfs pull` where it came from"


def is_pointer(path: Path) -> bool:
    """Whether a file is what Git has in place of a large one that was not fetched."""
    with path.open("rb") as file:
        return file.read(40).startswith(b"version https://git-lfs.github.com/")


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a checkpoint. Raises CheckpointError."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        if is_pointer(path):
            raise CheckpointError(f"{path} {POINTER}") from None
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return config


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that hold a checkpoint: of the index if there is one, else the single file."""
    index = read_index(directory)
    if index:
        return [directory / name for name in sorted(set(index.values()))]
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory: a checkpoint holds config.json and {SINGLE}, or {INDEX}")
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} is no checkpoint: it has no config.json, no {SINGLE} and no {INDEX}")
    for path in (directory / SINGLE, directory / INDEX):
        if path.is_symlink():  # a cache of checkpoints that was cleared in part has such
            raise CheckpointError(f"{path} is a link to {path.readlink()}, which is not there")
    others = sorted(p.name for p in directory.iterdir() if p.suffix in _WEIGHTS)[:8]
    only = f", only {', '.join(others)}" if others else ""
    raise CheckpointError(f"{directory} holds no {SINGLE} and no {INDEX} beside its config.json{only}")


def read_index(directory: Path) -> dict[str, str]:
    """Tensor -> the file that holds it, by the index; empty if there is none. Raises CheckpointError."""
    path = directory / INDEX
    if not path.is_file():
        return {}
    try:
        found: dict[str, str] = dict(json.loads(path.read_bytes())["weight_map"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = POINTER if is_pointer(path) else f"is not an index of safetensors files: {error!r}"
        raise CheckpointError(f"{path} {what}") from error
    files = set(map(str, found.values()))
    if not files or not all(isinstance(n, str) and n == Path(n).name for n in found.values()):
        raise CheckpointError(f"{path}: its files must lie beside it, it names {sorted(files)[:5]}")
    return found


def below_roots(path: str, roots: tuple[Path, ...], files: Sequence[str] = ()) -> Path:
    """The real directory behind `path`, if it and its files lie below a root. Raises CheckpointError.

    files: that will be read; () = those that hold a model's weights.
    """
    if "\0" in path:
        raise CheckpointError("a path holds no NUL", code="bad_message")
    real = Path(path).resolve()
    allowed = [root.resolve() for root in roots]
    if not any(real.is_relative_to(root) for root in allowed):
        setting = json.dumps([*map(str, roots), path])
        raise CheckpointError(
            f"{path} is not below a directory that checkpoints may be loaded from "
            f"({', '.join(map(str, roots)) or 'none is configured'}); start the service so that it is, or one "
            f"above it: serve --set 'store.disk_roots={setting}'",
            code="refused",
        )
    for file in [real / name for name in files] or {*weight_files(real), real / SINGLE}:
        if not any(file.resolve().is_relative_to(root) for root in allowed):
            raise CheckpointError(f"{file} points outside of the configured store.disk_roots", code="refused")
    return real
