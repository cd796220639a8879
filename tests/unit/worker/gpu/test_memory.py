"""Memory behind an address that outlives it, and the descriptors by which others hold it. Device memory is a memfd."""

import os
from pathlib import Path

import pytest

from tests.memfd_device import MemfdDriver
from worker.gpu.driver import CudaError
from worker.gpu.memory import Region


class Driver(MemfdDriver):
    """Counts what it takes milliseconds for on a device."""

    exported = 0

    def export(self, handle):
        self.exported += 1
        return super().export(handle)


def _same(one, other):
    return os.path.samestat(os.fstat(one), os.fstat(other))


def _open():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_memory_is_exported_once_however_often_it_is_lent():
    driver, before = Driver(), _open()
    region = Region(driver, 8192, "weights", shared=True)
    region.fill()
    first, second = region.lend(), region.lend()
    assert driver.exported == 1
    assert first != second
    assert _same(first, second)
    os.close(first)  # each is its receiver's alone
    third = region.lend()
    assert _same(third, second)
    for fd in (second, third):
        os.close(fd)
    region.empty()
    assert _open() == before, "nobody holds the memory"


def test_other_memory_behind_the_address_is_lent_as_what_it_is():
    driver = Driver()
    region = Region(driver, 8192, "weights", shared=True)
    region.fill()
    first = region.lend()
    region.empty()
    with pytest.raises(CudaError, match="could map"):
        region.lend()
    region.fill()
    second = region.lend()
    assert not _same(first, second)
    assert driver.exported == 2
    for fd in (first, second):
        os.close(fd)
    region.empty()
