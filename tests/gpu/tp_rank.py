"""`python -m worker` for a rank of several on a host that may have no Paddle: then ranks agree over a socket
(socket_signals.py), at $RANKS_MEET_AT, and everything else is as in a service."""

import importlib.util
import logging
import os
import sys
from pathlib import Path

from tests.gpu.socket_signals import SocketSignals
from worker import __main__ as started
from worker import boot
from worker.config import WorkerConfig


def main() -> int:
    if importlib.util.find_spec("paddle") is None:

        def joined(config: WorkerConfig, replica: int, rank: int) -> boot._World:
            signals = SocketSignals(Path(os.environ["RANKS_MEET_AT"]), rank, config.tp)
            return boot._World(replica, rank, signals, boot._NoGroups(), None, signals.pids)

        boot._join = joined
    return started.main()


if __name__ == "__main__":
    exit_status = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(exit_status)
