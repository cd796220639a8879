"""What a device needs before it can be used, begun while Python still imports the rest of a rank.

A context and the library of products are made by C, beside Python's own work. Nothing depends on this: the engine asks
for the same, and finds it there.
"""

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

from worker.gpu.driver import CudaError, Driver
from worker.gpu.libraries import load


def begin(config: Path, replica: int, rank: int) -> threading.Thread | None:
    """Begin, if the service's config names a GPU; the thread, for tests. What is wrong with the config, or with the
    device, is for others to say.
    """
    try:
        worker: dict[str, Any] = json.loads(config.read_text())["worker"]
        wanted = worker.get("device") == "gpu" and worker.get("engine", "paddle") == "paddle"
        ordinal = replica * int(worker.get("tp", 1)) + rank
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not wanted:
        return None
    thread = threading.Thread(target=_warm, args=(ordinal,), name="warming", daemon=True)
    thread.start()
    return thread


def _warm(ordinal: int) -> None:
    with contextlib.suppress(OSError, CudaError):
        Driver(ordinal)
        load("libcublasLt.so.1[0-9]", "nvidia-cublas")
