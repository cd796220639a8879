"""Any host: through a data socket where the store offers one (data_socket.py), else payload frames, which the store
receives straight into the staged slot.

One frame of 2 MiB to a message: large enough that headers and wake-ups cost nothing, small enough that the
receiver copies one while the next is on its way (several frames in a message arrive only together). ZMQ
sends from the trainer's own memory unless a cast made new bytes.

With `Kept` and a store that still holds what is kept, only what differs is sent (delta.py).
"""

import logging
from collections.abc import Sequence

from rollout_client.channel import Channel
from rollout_client.copying import WIRE_DTYPE, blocks, source_view
from rollout_client.data_socket import DataSocket
from rollout_client.delta import DeltaSender, Kept
from rollout_client.digest import Digest
from rollout_client.protocol import Chunk, Copy, Placement
from rollout_client.tensors import Array, Source
from rollout_client.transport import Reporter, Transport, by_part

log = logging.getLogger(__name__)

FRAME_BYTES = 2 << 20


class ZmqTransport(Transport):
    """Sends chunks through the publisher's channel, from its thread, or the bytes beside it."""

    name = "zmq"

    def __init__(self, channel: Channel, max_frame: int, kept: Kept | None = None, data_port: int = 0) -> None:
        """max_frame: the store's cap, bytes. kept: of the last push, for patches; it is brought up to date.

        data_port: of the store, 0 = it has none. Patches go as chunks.
        """
        self._channel = channel
        self._data_port = data_port
        self._kept = kept
        self.sent = 0  # bytes of payload, by the last `stage`
        self._frame = min(FRAME_BYTES, max_frame)

    def stage(self, placement: Placement, sources: Sequence[Source], reporter: Reporter) -> None:
        """See Transport."""
        self.sent = 0
        data = self._data_socket(placement)
        if data is not None:
            try:
                self.sent = data.stage(placement, sources, reporter)
            finally:
                data.close()
            return
        work = (
            (number, copy, flat, sources[part].part.dtype)
            for part, copies in by_part(placement.copies)
            for flat in [sources[part].load()]
            for number, copy in copies
        )
        if self._kept is not None:
            self.sent = DeltaSender(self._channel, self._kept, self._frame).stage(work, reporter)
        else:
            for number, copy, flat, dtype in work:
                self._send(number, copy, flat, dtype, reporter)
        reporter.flush()

    def _data_socket(self, placement: Placement) -> DataSocket | None:
        if self._kept is not None or not self._data_port or not placement.data_key:
            return None
        try:
            return DataSocket(self._channel.endpoint, self._data_port, placement.data_key)
        except OSError as error:
            self._channel.data_port_closed = True  # a firewall, perhaps: the next push need not wait for it again
            log.warning("no connection to the store's data port %d (%s): sending chunks", self._data_port, error)
            return None

    def _send(self, number: int, copy: Copy, flat: Array, src_dtype: str, reporter: Reporter) -> None:
        state = Digest()
        done = 0
        limit = self._frame // WIRE_DTYPE[copy.dst_dtype].itemsize
        for _, block in blocks(source_view(flat, copy), src_dtype, copy.dst_dtype, limit, fresh=True):
            raw = block.reshape(-1).data.cast("B")
            state.update(raw)
            while not self._channel.ready(reporter.patience_s):
                reporter.turn()
            self._channel.send(Chunk(reporter.session, number, done, [len(raw)]), [raw], timeout_s=reporter.left_s)
            self.sent += len(raw)
            reporter.moved(len(raw))
            reporter.turn()
            done += len(raw)
        reporter.written(number, state.intdigest(), done)
