"""Kernels compiled for one model and one kind of device by NVRTC, and kept on disk.

Sizes are macros, so the compiler unrolls what depends on them. What was compiled is named by a hash of all that it was
made from; a second start takes 0.01 s instead of 1.5.
"""

import ctypes
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

from rollout_client.native.compiler import cache, remove_unused, use
from weight_manager.whole_file import write_atomically
from worker.gpu.driver import CudaError, Pointer, Size
from worker.gpu.libraries import load

log = logging.getLogger(__name__)

_TOGETHER = 4
"""Instances of products in one text: the compiler takes 0.2 s for each, and next to nothing for what comes before."""
_FOLDER = Path(__file__).parent / "kernels"
_begun: dict[str, Future[bytes]] = {}
"""What `begin` was asked for, by the name under which it is kept."""


def sources(instances: Sequence[str] = (), *, experts: bool = True, sums: bool = False) -> list[str]:
    """All kernels of a model, as texts that are compiled apart, in the order in which a start needs them: products and
    what goes before and after them are timed while the others are made. instances: lines that instantiate templates of
    products. experts: those of layers that have some. sums: those of ranks that share one.
    """
    rows, others = ["rows", *(["sums"] if sums else [])], [["attention", "prefill"], ["sampling"]]
    products = spread(kernels("follow", "base", "one_row", "skinny"), instances)
    parts = [rows, *others, *([["experts"]] if experts else [])]
    texts = [kernels("follow", "base", *part) for part in parts]
    return [texts[0], *products, *texts[1:]]


def spread(begin: str, instances: Sequence[str]) -> list[str]:
    """Texts that all begin so, and instantiate a few each."""
    return ["\n".join((begin, *instances[at : at + _TOGETHER])) for at in range(0, len(instances), _TOGETHER)]


def kernels(*names: str) -> str:
    """The files of these names, one after the other."""
    return "\n".join((_FOLDER / f"{name}.cu").read_text() for name in names)


def begin(texts: Sequence[str], macros: Mapping[str, int], capability: tuple[int, int]) -> list[Future[bytes]]:
    """A cubin of each, or what becomes one: the compiler is at work on all of them while the caller goes on. Whoever
    asks for one of these waits for it.
    """
    options = _options(macros, capability)
    names = [_name(text, options) for text in texts]
    pool = ThreadPoolExecutor(min(len(texts), os.cpu_count() or 1), thread_name_prefix="compiling")
    for text, name in zip(texts, names, strict=True):
        if name not in _begun:
            _begun[name] = pool.submit(_made, text, options)
    pool.shutdown(wait=False)
    return [_begun[name] for name in names]


def compiled_apart(texts: Sequence[str], macros: Mapping[str, int], capability: tuple[int, int]) -> list[bytes]:
    """A cubin of each; as `compiled`, and at the same time."""
    with ThreadPoolExecutor(min(len(texts), os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda text: compiled(text, macros, capability), texts))


def compiled(text: str, macros: Mapping[str, int], capability: tuple[int, int]) -> bytes:
    """A cubin of `text`. Raises CudaError with the compiler's words, OSError when there is no NVRTC."""
    options = _options(macros, capability)
    begun = _begun.get(_name(text, options))
    return _made(text, options) if begun is None else begun.result()


def _options(macros: Mapping[str, int], capability: tuple[int, int]) -> list[str]:
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17", "-default-device"]
    return options + [f"-D{name}={value}" for name, value in sorted(macros.items())]


def _name(text: str, options: list[str]) -> str:
    return f"{xxhash.xxh3_128_hexdigest(repr((text, options)).encode())}.cubin"


def _made(text: str, options: list[str]) -> bytes:
    name = _name(text, options)
    image = kept(name)
    if image is None:
        image = _compile(text, options)
        keep(name, image)
    return image


def kept(name: str) -> bytes | None:
    """What an earlier start has kept under this name; None = nothing that can be read."""
    try:
        path = cache() / name
        content = path.read_bytes()
    except OSError:
        return None
    use(path)
    return content


def keep(name: str, content: bytes) -> None:
    """Keep it for the next start; a cache that cannot be written is none."""
    try:
        remove_unused()
        write_atomically(cache() / name, content)
    except OSError as error:
        log.warning("%s is not kept for the next start: %s", name, error)


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
