"""Threads of ZMQ that get a processor as soon as they wake, also where all cores compute.

A message is in four threads' hands, and two of them are ZMQ's, which need microseconds. Woken on a core that computes,
each waits for the end of somebody's slice: for one to three milliseconds, of which a push of an adapter has ten. Linux,
since 6.12, lets a thread ask for slices shorter than those of others: it gets no more of a processor, but sooner.
Everybody may ask for that.
"""

import ctypes
import os
import platform
import struct
from functools import cache
from typing import Any

import zmq

SLICE_NS = 100_000
"""The least that Linux takes."""
_SET, _GET = {"x86_64": (314, 315), "aarch64": (274, 275)}.get(platform.machine(), (None, None))
_ATTRIBUTES = struct.Struct("IIQiIQQQ")
"""Linux's sched_attr: size, policy, flags, nice, priority, slice in nanoseconds (0 = as others have it), two more."""
_syscall: Any = ctypes.CDLL(None).syscall


def prompt_context() -> "zmq.Context[zmq.Socket[bytes]]":
    """A context of ZMQ, its threads begun with short slices if that is `possible`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    wanted = possible() and _ask(SLICE_NS)
    try:
        context.socket(zmq.PAIR).close(0)  # with the first one its threads begin, which inherit the slice
    finally:
        if wanted:
            _ask(0)
    return context


@cache
def possible() -> bool:
    """Whether threads get the slices that they ask for here."""
    before = slice_ns()
    if not _ask(SLICE_NS):
        return False
    held = slice_ns()
    _ask(0)
    return held == SLICE_NS != before


def slice_ns(thread: int = 0) -> int:
    """Of a thread by its number, 0 = this one; 0 where Linux does not say."""
    if _GET is None:
        return 0
    said = ctypes.create_string_buffer(_ATTRIBUTES.size)
    return _ATTRIBUTES.unpack(said.raw)[5] if _syscall(_GET, thread, said, len(said), 0) == 0 else 0


def _ask(nanoseconds: int) -> bool:
    """Whether this thread, if it is an ordinary one, was given slices of this length, or said to have been."""
    if _SET is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)  # of this thread
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, nanoseconds, 0, 0)
    return bool(_syscall(_SET, 0, ctypes.create_string_buffer(wanted, len(wanted)), 0) == 0)
