"""A process that waits to become a rank (spares.py): everything is loaded, and nothing is known yet."""

import json
import os
import signal
import sys
from pathlib import Path

from worker.config import read_worker_config


def wait(config_path: Path) -> list[str] | None:
    """Load what every rank loads, then sleep until stdin says which one to be: its arguments, None = none.

    The environment that came with the word is set when this returns.
    """
    config = read_worker_config(config_path)
    if config.engine == "paddle":
        _load(config.device, config.threads, config.ranks_on_host)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Paddle's import put a handler of its own on it, which aborts
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    line = sys.stdin.readline()
    if not line:
        return None
    word = json.loads(line)
    os.environ.update(word["env"])
    argv: list[str] = word["argv"]
    return argv[argv.index("worker") + 1 :]


def _load(device: str, threads: int | None, ranks_on_host: int) -> None:
    import tokenizers  # noqa: PLC0415, F401  an engine of tests needs none of this

    import worker.boot  # noqa: PLC0415

    if device == "gpu":
        import worker.gpu.engine  # noqa: PLC0415  the device itself is entered by whoever computes on it

        return
    from worker.cpu.tuning import load_paddle, tune  # noqa: PLC0415

    tune(threads, ranks_on_host)
    load_paddle()
    import paddle.distributed  # noqa: PLC0415, F401

    import worker.engine.paddle_engine  # noqa: PLC0415
    import worker.gloo_signals  # noqa: PLC0415
    import worker.process_groups  # noqa: F401, PLC0415
