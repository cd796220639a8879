"""Kernels compiled for one model and one kind of device by NVRTC, and kept on disk.

Sizes are macros, so the compiler unrolls what depends on them. What was compiled is named by a hash of all that it was
made from; a second start takes 0.01 s instead of 1.5.
"""

import ctypes
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from worker.gpu.driver import CudaError, Pointer, Size
from worker.gpu.libraries import load

_TOGETHER = 4
"""Instances of products in one text: the compiler takes 0.2 s for each, and next to nothing for what comes before."""
_FOLDER = Path(__file__).parent / "kernels"


def cache_folder() -> Path:
    """Where what takes long to find out is kept between starts: $XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "paddle-rollout"


def sources(instances: Sequence[str] = (), *, experts: bool = True, sums: bool = False) -> list[str]:
    """All kernels of a model, as texts that are compiled apart, those that take longest first. instances: lines that
    instantiate templates of products. experts: those of layers that have some. sums: those of ranks that share one.
    """
    parts = [["attention", "prefill"], ["rows", *(["sums"] if sums else [])], *([["experts"]] if experts else [])]
    products = spread(kernels("follow", "base", "one_row", "skinny"), instances)
    return [kernels("follow", "base", "sampling"), *products, *(kernels("follow", "base", *part) for part in parts)]


def spread(begin: str, instances: Sequence[str]) -> list[str]:
    """Texts that all begin so, and instantiate a few each."""
    return ["\n".join((begin, *instances[at : at + _TOGETHER])) for at in range(0, len(instances), _TOGETHER)]


def kernels(*names: str) -> str:
    """The files of these names, one after the other."""
    return "\n".join((_FOLDER / f"{name}.cu").read_text() for name in names)


def compiled_apart(texts: Sequence[str], macros: Mapping[str, int], capability: tuple[int, int]) -> list[bytes]:
    """A cubin of each; as `compiled`, and at the same time."""
    with ThreadPoolExecutor(min(len(texts), os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda text: compiled(text, macros, capability), texts))


def compiled(text: str, macros: Mapping[str, int], capability: tuple[int, int]) -> bytes:
    """A cubin of `text`. Raises CudaError with the compiler's words, OSError when there is no NVRTC."""
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17", "-default-device"]
    options += [f"-D{name}={value}" for name, value in sorted(macros.items())]
    kept = cache_folder() / f"{xxhash.xxh3_128_hexdigest(repr((text, options)).encode())}.cubin"
    try:
        return kept.read_bytes()
    except OSError:
        image = _compile(text, options)
        keep(kept, image)
        return image


def keep(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; a cache that cannot be written is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file)  # or a machine that loses power now may have an empty one for good
        Path(name).replace(path)
    except OSError:
        return


def _compile(text: str, options: list[str]) -> bytes:
    nvrtc = load("libnvrtc.so.1[0-9]", "nvidia-cuda-nvrtc")
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p

    def check(code: int) -> None:
        if code:
            raise CudaError(f"NVRTC: {nvrtc.nvrtcGetErrorString(code).decode()}")

    program, size = Pointer(), Size()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None))
    try:
        code = nvrtc.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options))
        )
        if code:
            check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            words = ctypes.create_string_buffer(size.value)
            check(nvrtc.nvrtcGetProgramLog(program, words))
            raise CudaError(f"the kernels do not compile for this device: {words.value.decode()[:2000]}")
        check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        image = ctypes.create_string_buffer(size.value)
        check(nvrtc.nvrtcGetCUBIN(program, image))
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw
