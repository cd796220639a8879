"""Captured graphs of a decoder's steps: which there are, when one is made, and when it goes.

A graph holds addresses and sizes, of one weight slot; what differs between two steps is read from the device. So there
is one for every slot and *kind* of step (`StepInputs.kind`):

    decode steps            every size, from the start on
    ... with adapters       when the first step of a size comes
    prompts, mixed steps    when a kind comes for the second time; the `_MOST` that were used last are kept

Making a graph costs the host as much as launching kernel by kernel does, so a kind of prompts that comes once has none.
Which there are follows from the steps alone: of ranks that share a model all make and drop the same ones.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager

from worker.gpu.driver import Driver, Handle

_MOST = 64  # graphs of prompts and mixed steps
_REMEMBERED = 1024  # kinds that came once

Key = tuple[int, ...]
"""The weight slot, and a step's kind."""


class Graphs:
    """What is captured on one stream.

    around: what captures are made in. shared: ranks share the model; a graph that is made may wait for the device, and
    so for sums, so none is made while one is under way.
    """

    def __init__(
        self, driver: Driver, stream: Handle, around: Callable[[], AbstractContextManager[None]], *, shared: bool
    ) -> None:
        self._driver, self._stream, self._around, self._shared = driver, stream, around, shared
        self._decode: dict[Key, Handle] = {}
        self._adapted: dict[Key, Handle] = {}
        self._mixed: OrderedDict[Key, Handle] = OrderedDict()
        self._mixed_adapted: OrderedDict[Key, Handle] = OrderedDict()
        self._once: OrderedDict[Key, None] = OrderedDict()
        self._sites: frozenset[int] = frozenset()  # that graphs with adapters have launches for

    def decode(self, key: Key, record: Callable[[], object]) -> Handle:
        """Of a decode step without adapters. record: launches it."""
        if key not in self._decode:
            self._decode[key] = self._captured(record)
        return self._decode[key]

    def adapted(self, key: Key, sites: frozenset[int], record: Callable[[], object]) -> Handle:
        """Of a decode step with adapters that change these sites: of whatever versions."""
        self._require(sites)
        if key not in self._adapted:
            self._settle()
            self._adapted[key] = self._captured(record)
        return self._adapted[key]

    def mixed(self, key: Key, sites: frozenset[int] | None, record: Callable[[], object]) -> Handle | None:
        """Of any other step; None: it is the first of its kind. sites: None = there are no adapters in it."""
        if sites is not None:
            self._require(sites)
        graphs = self._mixed if sites is None else self._mixed_adapted
        if key in graphs:
            graphs.move_to_end(key)
        elif key not in self._once:
            self._once[key] = None
            if len(self._once) > _REMEMBERED:
                self._once.popitem(last=False)
            return None
        else:
            del self._once[key]
            if len(graphs) >= _MOST:
                self._driver.wait(self._stream)
                self._driver.drop(graphs.popitem(last=False)[1])
            self._settle()
            graphs[key] = self._captured(record)
        return graphs[key]

    def drop(self) -> None:
        """Hold none."""
        self._drop(self._decode, self._mixed, self._adapted, self._mixed_adapted)

    def _require(self, sites: frozenset[int]) -> None:
        """Graphs with adapters are for these sites from now on."""
        if self._sites != sites:
            self._drop(self._adapted, self._mixed_adapted)
            self._sites = sites

    def _captured(self, record: Callable[[], object]) -> Handle:
        with self._around():
            return self._driver.captured(self._stream, record)

    def _settle(self) -> None:
        if self._shared:
            self._driver.wait(self._stream)

    def _drop(self, *held: dict[Key, Handle]) -> None:
        self._driver.wait(self._stream)
        for graphs in held:
            while graphs:
                self._driver.drop(graphs.popitem()[1])
