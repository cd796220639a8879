"""Where NVIDIA's libraries are found: the wheels of the `gpu` extra first, then a CUDA toolkit, then the system's."""

import ctypes
import sysconfig
from functools import cache
from pathlib import Path

_TOOLKITS = (
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/x86_64-linux/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
)
_WHEELS = ("nvidia/cu13/lib", "nvidia/*/lib")


@cache
def load(name: str, wheel: str, extra: str = "gpu") -> ctypes.CDLL:
    """The library ``name`` (a pattern such as ``libnvrtc.so.1[23]``). Raises OSError naming who has it."""
    for root in {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}:
        for folder in _WHEELS:
            for path in sorted(Path(root).glob(f"{folder}/{name}"), reverse=True):
                return ctypes.CDLL(str(path))
    for folder in _TOOLKITS:
        for path in sorted(Path(folder).glob(name), reverse=True):
            return ctypes.CDLL(str(path))
    wanted = f"pip install 'paddle-rollout[{extra}]' (or {wheel})"
    raise OSError(f"device gpu needs {name}: {wanted}, or install a CUDA toolkit")
