"""For a process that a test starts with this directory in PYTHONPATH: its libcuda.so.1 is tests/memfd_device.py."""

import ctypes
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))


class Opened(ctypes.CDLL):
    """What ctypes.CDLL gives, but for one library."""

    def __new__(cls, name, *arguments, **options):
        if name != "libcuda.so.1":
            return super().__new__(cls)
        from tests.memfd_device import MemfdCuda

        return MemfdCuda()


ctypes.CDLL = Opened
