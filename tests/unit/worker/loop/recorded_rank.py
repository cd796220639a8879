"""`python -m worker` over recorded libraries (tests/recording_cuda.py): a rank of a replica on GPUs without one.

What stands in besides, as a device that reads as zeros is refused: the self-tests and the proof of what it holds pass.
Every token drawn is 5.
At its end a rank writes down the collectives that it launched, in $RECORDED.RANK, and what was done to memory of
adapters in which thread.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import recording_cuda
from worker import __main__ as started
from worker.engine.base import Drawn
from worker.gpu import adapter_check, adapters, digests, drawing, engine

TOKEN = 5


def main() -> int:
    recording = recording_cuda.install(pytest.MonkeyPatch(), recording_cuda.Recording())
    engine.require_right = engine.require_sums = lambda *_: None  # type: ignore[assignment]
    digests.DeviceDigests.holds = lambda *_: True  # type: ignore[assignment,method-assign]

    def finished(self: drawing.Drawing, before: object, count: int) -> Drawn:
        return Drawn(np.full(count, TOKEN), np.zeros(count), np.ones(count, np.bool_), np.zeros(count, np.bool_))

    drawing.Drawing.finished = finished  # type: ignore[method-assign]
    threads: list[tuple[str, str]] = []

    def noted(method: str) -> None:
        real = getattr(adapters.DeviceAdapters, method)

        def call(self: adapters.DeviceAdapters, *arguments: Any) -> Any:
            threads.append((method, threading.current_thread().name))
            return real(self, *arguments)

        setattr(adapters.DeviceAdapters, method, call)

    for method in ("_memory", "_give_back", "hold"):
        noted(method)
    adapters.DeviceAdapters._prove = lambda *_: None
    adapter_check.require_right = lambda _: None
    rank = sys.argv[sys.argv.index("--rank") + 1] if "--rank" in sys.argv else "0"
    status = started.main()
    counted = recording.collectives
    graphs = len(recording.of("cuGraphLaunch"))
    lives = [call[0] for call in recording.of("ncclCommInitRank", "ncclCommDestroy", "ncclCommAbort")]
    Path(f"{os.environ['RECORDED']}.{rank}").write_text(json.dumps([counted, graphs, lives, threads]))
    return status


if __name__ == "__main__":
    exit_status = main()
    os._exit(exit_status)
