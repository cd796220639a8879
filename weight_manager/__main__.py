"""`python -m weight_manager --config run_dir/config.json`: the weight store process."""

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

from weight_manager import logs
from weight_manager.config import StoreConfig
from weight_manager.ending import ASKED_S, ORPHANED_S, Ending
from weight_manager.errors import StartError, TooSlow
from weight_manager.store import Store

log = logging.getLogger("weight_manager")

NICE = -10
FEW_CORES = 4
PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def main() -> int:
    """0 after SIGTERM or SIGINT; 1 if the store cannot start, with the reason on stderr; EX_CONFIG if no try could."""
    parser = argparse.ArgumentParser(prog="python -m weight_manager", description="Weight store of one service.")
    parser.add_argument("--config", type=Path, required=True, help="the service's config.json")
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # shared memory must not outlive the service
    if os.getppid() != parent:
        return 1
    _keep_frame_buffers()
    _go_first()
    logs.setup("store")
    try:
        return _serve(StoreConfig.read(parser.parse_args().config), parent)
    except StartError as error:
        log.error("%s", error)
        return os.EX_CONFIG if isinstance(error, TooSlow) else 1


def _serve(config: StoreConfig, parent: int) -> int:
    """A signal that comes while the arena is being made is obeyed once it is there and can be removed."""
    logs.setup("store", config.log_level)
    ending = Ending(parent, orphaned_s=ASKED_S if config.snapshot else ORPHANED_S)
    try:
        store = Store(config, made=ending.made)
        ending.tell(store.stop)
        store.run()
    except StartError:
        ending.spare()
        raise
    except BaseException:
        log.critical("the store has failed; the next one takes over what is live", exc_info=True)
        logging.shutdown()
        os._exit(1)  # no thread, no socket and no bug in their ends keeps the next one waiting
    finally:
        ending.begin()
    return 0


def _go_first() -> None:
    """Ahead of replicas that compute: the store needs the processors only while a push is under way, and a trainer and
    all replicas wait for it then. Needs CAP_SYS_NICE; without it the store waits for slices like everybody. So it does
    on a few cores, where it would have all of them, and a step would stand still for as long as it checks.
    """
    if len(os.sched_getaffinity(0)) <= FEW_CORES:
        return
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)


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
