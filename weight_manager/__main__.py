"""`python -m weight_manager --config run_dir/config.json`: the weight store process."""

import argparse
import ctypes
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from weight_manager import logs
from weight_manager.config import StoreConfig
from weight_manager.errors import StartError
from weight_manager.store import Store

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def main() -> int:
    """0 after SIGTERM or SIGINT; 1 if the store cannot start, with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m weight_manager", description="Weight store of one service.")
    parser.add_argument("--config", type=Path, required=True, help="the service's config.json")
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # shared memory must not outlive the service
    if os.getppid() != parent:
        return 1
    _keep_frame_buffers()
    logs.setup("store")
    try:
        return _serve(StoreConfig.read(parser.parse_args().config))
    except StartError as error:
        logging.getLogger("weight_manager").error("%s", error)
        return 1


def _serve(config: StoreConfig) -> int:
    """A signal that comes while the arena is being made is obeyed once it is there and can be removed."""
    logs.setup("store", config.log_level)
    asked = threading.Event()
    store: Store | None = None

    def stop(*_: object) -> None:
        asked.set()
        if store is not None:
            store.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    store = Store(config)
    signal.set_wakeup_fd(store.wakeup_fd)  # else a signal just before the poll would wait for the poll's end
    if asked.is_set():
        store.stop()
    try:
        store.run()
    finally:
        signal.set_wakeup_fd(-1)
    return 0


def _keep_frame_buffers() -> None:
    """Let the C library reuse the memory of payload frames: mapped and faulted in anew for each, they cost a third
    of a push over the network. A libc that takes no such advice goes on as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for option, nbytes in ((M_MMAP_THRESHOLD, 32 << 20), (M_TRIM_THRESHOLD, 256 << 20), (M_TOP_PAD, 16 << 20)):
        if mallopt is not None:
            mallopt(option, nbytes)


if __name__ == "__main__":
    sys.exit(main())
