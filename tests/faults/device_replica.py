"""Stands for rank 0 of a replica on a device: tests/faults/replica.py with the real filling over memory of a memfd."""

from pathlib import Path
from typing import Any

from rollout_client.device_slots import socket_of
from tests.faults.replica import Replica
from tests.faults.small_model import LAYOUT
from tests.faults.store_process import Store
from tests.memfd_device import HostDigests, MemfdDriver, MemfdPuller
from weight_manager import messages
from weight_manager.arena import ArenaReader
from weight_manager.layout import rank_views
from weight_manager.messages import Live
from worker.gpu.filling import Filling
from worker.gpu.weights import DeviceSlots, Staged, placement


class DeviceReplica(Replica):
    """What it serves it reads from its own memory. driver, digests, puller: of a real device, instead."""

    def __init__(
        self,
        store: Store,
        number: int = 0,
        *,
        driver: Any = None,
        digests: Any = None,
        puller: Any = None,
        **plan: Any,
    ) -> None:
        driver = driver or MemfdDriver()
        self.slots = DeviceSlots(driver, placement(LAYOUT, 0))
        self.digests = digests or HostDigests(LAYOUT)
        self.filling = Filling(self.slots, self.digests, puller or MemfdPuller(driver))
        self.filling.listen(socket_of(store.run_dir, number))
        self.bound: Staged | None = None
        self._next: Staged | None = None
        self._last: Staged | None = None
        self._reader: ArenaReader | None = None
        super().__init__(store, number, **plan)

    def served(self) -> tuple[int, str]:
        assert self.live is not None
        assert self.bound is not None
        return self.live.version, self.digests.version(self.slots.regions[self.bound.slot].address)

    def die(self) -> None:
        """With all that it holds, as a process does."""
        super().die()
        Path(socket_of(self.store.run_dir, self.number)).unlink()
        self._let_go()

    def close(self) -> None:
        super().close()
        self._let_go()

    def _let_go(self) -> None:
        self.slots.enter()
        self.bound = self._next = self._last = None
        self.filling.withdraw()  # before the arena, of which the driver has registered what it copies from
        for region in self.slots.regions:
            region.empty()
        if self._reader is not None:
            self._reader.close()

    def _stage(self, live: Live) -> str:
        if self._reader is None or str(self._reader.path) != self.arena_path:
            self._reader = ArenaReader(self.arena_path)
        try:
            self._next = self.filling.stage(live, rank_views(LAYOUT, 0, self._reader.slot(live.slot)))
        except ValueError as error:
            return str(error)
        return ""

    def _bind(self, staged: Staged | None) -> None:
        self.slots.bind(staged)
        self.bound = staged

    def _answer(self, message: Any, what: str) -> Any:
        if what == "yes":
            match message:
                case messages.Registered(live=Live() as live) | messages.Adopt(live=live):
                    if isinstance(message, messages.Registered):
                        self.arena_path = message.arena_path
                    if error := self._stage(live):
                        return messages.Adopted(live.epoch, False, 0, error)
                    self._bind(self._next)
                case messages.Prepare(adapter=None, live=live):
                    if error := self._stage(live):
                        return messages.Prepared(message.session, False, 0, error)
                case messages.Flip():
                    self._last = self.bound
                    self._bind(self._next)
                case messages.Finalize(adapter=""):
                    self._last = self._next = None
                case messages.Rollback():
                    if self._last is not None:
                        self._bind(self._last)
                    self._last = self._next = None
        return super()._answer(message, what)
