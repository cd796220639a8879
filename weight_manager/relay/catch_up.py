"""Brings a store below that holds something else of a line to what is live here, outside any session."""

import logging
import secrets
from collections.abc import Callable, Sequence

from weight_manager.background import Background
from weight_manager.history import History
from weight_manager.layout import Layout, region_digests
from weight_manager.messages import Live
from weight_manager.relay import messages as wire
from weight_manager.relay.messages import version_of
from weight_manager.relay.roster import Downstream, Enrolment, Roster
from weight_manager.relay.stream import Stream
from weight_manager.slots import Slots

log = logging.getLogger(__name__)


class CatchUp:
    """The live slot as a stream that is complete from the start."""

    def __init__(
        self,
        adapter: wire.StagedAdapter | None,
        layout: Layout,
        roster: Roster,
        slots: Slots,
        history: History,
        background: Background,
        *,
        busy: Callable[[], bool],
    ) -> None:
        """adapter: whose version is live; None = the model's. busy: a session runs; it brings them there, too."""
        self._adapter = adapter
        self._line = adapter.name if adapter is not None else ""
        self._layout = layout
        self._roster = roster
        self._slots = slots
        self._history = history
        self._background = background
        self._busy = busy
        self._sealed: list[int] = []  # digests of every region of what may go live next
        self._digests: tuple[int, list[int]] = (0, [])  # epoch of what is live, when they are known, and its digests
        self._reading = 0  # epoch of what is being read for them

    def sealed(self, digests: Sequence[int]) -> None:
        """A session is complete: the digests of all regions, in the layout's order."""
        self._sealed = list(digests)

    def went_live(self, live: Live) -> None:
        """The version sealed last is live. A reading of the one before may have ended after `sealed`."""
        self._digests = live.epoch, self._sealed

    def offer(self, store: Downstream) -> None:
        """Begin, if it is needed and nothing runs for this store."""
        live = self._history.live
        if live is None or self._busy() or self._line in store.enrolments:
            return
        if store.holds.of(self._line) == version_of(live):
            return
        if self._digests[0] != live.epoch:
            self._read_digests(live)
            return
        stream = Stream(self._layout)
        stream.finish(self._digests[1])
        slot = self._slots.arena.slot(live.slot)
        enrolment = Enrolment(secrets.token_hex(8), stream, slot, required=False, catch_up=True, digest=live.digest)
        port, key = self._roster.give(store, self._line, enrolment)
        stage = wire.Stage(
            *(enrolment.session, live.run_id, live.version),
            digest=live.digest,
            catch_up=True,
            data_port=port,
            data_key=key,
            adapter=self._adapter,
            merged=self._history.is_merged(live.digest),
        )
        self._roster.send(store, stage)

    def _read_digests(self, live: Live) -> None:
        if self._reading == live.epoch:
            return  # all are offered it then
        self._reading = live.epoch
        slot = self._slots.arena.slot(live.slot)

        def done(digests: list[int]) -> None:
            if self._history.live == live:
                self._digests = live.epoch, digests
                for store in self._roster.all():
                    self.offer(store)

        def failed(error: BaseException) -> None:
            self._reading = 0
            log.error("the live version cannot be read", exc_info=error)

        self._background.submit(lambda: region_digests(self._layout, slot), done, failed)
