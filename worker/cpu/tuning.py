"""Settings that have to be made before Paddle is loaded. Each is gated, announced, and the user's own value wins.

On two cores they are worth a factor of two to four in tokens per second; the numbers are in docs/.
"""

import contextlib
import ctypes
import io
import logging
import os
import platform
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from worker.cpu.cores import usable_cores

log = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
_THREADS_WARNING = ("WARNING: OMP_NUM_THREADS set to", "PLEASE USE OMP_NUM_THREADS WISELY")
_KEEP = 1 << 30
"""Bytes. Freed memory up to this stays with the process, and no temporary below it is mapped anew."""


def tune(threads: int | None, ranks_on_host: int) -> dict[str, str]:
    """Make every setting that fits this machine; returns what was set. Call before ``import paddle``.

    threads: compute threads of this rank; None = the cores it may use, divided by the ranks on this host.
    """
    if "paddle" in sys.modules:
        log.warning("Paddle is already loaded: start-up tuning has no effect")
        return {}
    warnings.filterwarnings("ignore", message="No ccache found", category=UserWarning)
    chosen = environment(_cpuinfo(), threads or max(1, usable_cores() // ranks_on_host))
    made = {name: value for name, value in chosen.items() if name not in os.environ}
    os.environ.update(made)
    if "PADDLE_ROLLOUT_NO_MALLOPT" not in os.environ and _keep_freed_memory():
        made["mallopt"] = f"keep {_KEEP >> 30} GiB"
    kept = {name: os.environ[name] for name in chosen if name not in made}
    log.info("tuned %s%s", made, f"; kept from the environment {kept}" if kept else "")
    return made


def load_paddle() -> None:
    """``import paddle``, without its warning of OMP_NUM_THREADS: that is what `tune` has set, and means no harm here.

    Everything else that is said meanwhile is passed on; the variable stays as it is.
    """
    with contextlib.redirect_stderr(_WithoutThreadsWarning(sys.stderr)) as kept:
        try:
            import paddle  # noqa: F401, PLC0415
        finally:
            kept.flush()


class _WithoutThreadsWarning(io.TextIOBase):
    """Passes text on, line by line, but for the two lines of that warning."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        self._out.writelines(f"{line}\n" for line in lines if not line.startswith(_THREADS_WARNING))
        return len(text)

    def flush(self) -> None:
        self._out.write(self._begun)
        self._begun = ""
        self._out.flush()

    def fileno(self) -> int:
        return self._out.fileno()


def environment(cpuinfo: Mapping[str, str], threads: int) -> dict[str, str]:
    """Environment variables for a machine. cpuinfo: the fields of one core in /proc/cpuinfo."""
    chosen = {
        # More threads than cores is slower than one thread.
        "OMP_NUM_THREADS": str(threads),
        # Strided copies run 8 to 20 times faster; views become copies.
        "FLAGS_use_stride_kernel": "0",
    }
    if cpuinfo.get("vendor_id") == "AuthenticAMD":
        # The MKL of 2019 in Paddle's wheel takes its slowest path on AMD unless told what the core can do:
        # 7 = AVX-512, 5 = AVX2. 7 on a core without AVX-512 is an illegal instruction.
        flags = cpuinfo.get("flags", "").split()
        if "avx512f" in flags:
            chosen["MKL_DEBUG_CPU_TYPE"] = "7"
        elif "avx2" in flags:
            chosen["MKL_DEBUG_CPU_TYPE"] = "5"
    return chosen


def _cpuinfo() -> dict[str, str]:
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _keep_freed_memory() -> bool:
    """Temporaries of a few MB are otherwise mapped, faulted in and unmapped in every step. glibc only."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    results = [mallopt(option, _KEEP) for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD)]
    return all(results)
