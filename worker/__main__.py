"""One rank: ``python -m worker --config run_dir/config.json --replica R --rank K``."""

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path

from worker.starting import born


def main() -> int:
    """Exit status: 0 after a drain, 2 for a configuration error, 71 when the ranks lost each other."""
    # Before any library starts a thread, which would take it: while Paddle is imported its own handler would abort us.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the service's config.json")
    parser.add_argument("--replica", type=int, help="which replica this rank is of, from 0")
    parser.add_argument("--rank", type=int, default=0, help="which rank of the replica, from 0")
    parser.add_argument("--spare", action="store_true", help="load everything, then learn from stdin which rank to be")
    arguments = parser.parse_args()
    began = born()
    if arguments.spare:
        from worker.spare import wait  # noqa: PLC0415

        told = wait(arguments.config)
        if told is None:
            return 0
        began = time.monotonic()
        arguments = parser.parse_args(told)
    if arguments.replica is None:
        parser.error("--replica is needed")
    with contextlib.suppress(OSError):  # what `ps -o comm` shows; a spare's command line says nothing
        Path("/proc/self/comm").write_text(f"replica-{arguments.replica}.{arguments.rank}")
    from worker.gpu import warming  # noqa: PLC0415  --help does not wait for these

    warming.begin(arguments.config, arguments.replica, arguments.rank)
    from worker.boot import run_rank  # noqa: PLC0415

    return run_rank(arguments.config, arguments.replica, arguments.rank, began)


if __name__ == "__main__":
    exit_status = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(exit_status)  # everything of ours is closed; tearing Paddle down takes seconds on a busy host
