"""Captured graphs of a decoder's steps: which there are, when one is made, and when it goes.

A graph holds addresses and sizes, of one weight slot; what differs between two steps is read from the device. So there
is one for every slot and *kind* of step (`StepInputs.kind`):

    decode steps            every size, from the start on
    ... with adapters       when the first step of a size comes
    prompts, mixed steps    when a kind comes for the second time; the `_MOST` that were used last are kept, and as
                            many of those with adapters

Making a graph costs the host as much as launching kernel by kernel does, so a kind of prompts that comes once has none.
Which there are follows from the steps alone: of ranks that share a model all make and drop the same ones. One that a
device has no room for keeps its place among them without being there: its steps are launched kernel by kernel, which
needs no memory, and it is tried again where the others would make it anew.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager

from worker.gpu.driver import DeviceMemoryError, Driver, Handle

log = logging.getLogger(__name__)

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
        self._decode: dict[Key, Handle | None] = {}
        self._adapted: dict[Key, Handle | None] = {}
        self._mixed: OrderedDict[Key, Handle | None] = OrderedDict()
        self._mixed_adapted: OrderedDict[Key, Handle | None] = OrderedDict()
        self._once: OrderedDict[Key, None] = OrderedDict()
        self._sites: frozenset[int] = frozenset()  # that graphs with adapters have launches for
        self._told = False  # that there is no room

    def decode(self, key: Key, record: Callable[[], object]) -> Handle:
        """Of a decode step without adapters. record: launches it. Raises CudaError."""
        graph = self._decode.get(key)
        if graph is None:
            graph = self._decode[key] = self._captured(record)
        return graph

    def adapted(self, key: Key, sites: frozenset[int], record: Callable[[], object]) -> Handle | None:
        """Of a decode step with adapters that change these sites: of whatever versions; None: there is no room for it.
        Raises CudaError.
        """
        self._require(sites)
        if key not in self._adapted:
            self._settle()
            self._adapted[key] = self._captured_if_there_is_room(record)
        return self._adapted[key]

    def mixed(self, key: Key, sites: frozenset[int] | None, record: Callable[[], object]) -> Handle | None:
        """Of any other step; None: it is the first of its kind, or there is no room. sites: None = no adapters are in
        it. Raises CudaError.
        """
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
                self._let_go(graphs.popitem(last=False)[1])
            self._settle()
            graphs[key] = self._captured_if_there_is_room(record)
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

    def _captured_if_there_is_room(self, record: Callable[[], object]) -> Handle | None:
        try:
            graph = self._captured(record)
        except DeviceMemoryError as error:
            if not self._told:
                log.warning("no room for the graph of a step, which is launched kernel by kernel: %s", error)
            self._told = True
            return None
        self._told = False
        return graph

    def _settle(self) -> None:
        if self._shared:
            self._driver.wait(self._stream)

    def _drop(self, *held: dict[Key, Handle | None]) -> None:
        self._driver.wait(self._stream)
        for graphs in held:
            while graphs:
                self._let_go(graphs.popitem()[1])

    def _let_go(self, graph: Handle | None) -> None:
        if graph is not None:
            self._driver.drop(graph)
