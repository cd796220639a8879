"""Any host: payload frames, which the store receives straight into the staged slot.

One frame of 2 MiB to a message: large enough that headers and wake-ups cost nothing, small enough that the
receiver copies one while the next is on its way (several frames in a message arrive only together). ZMQ
sends from the trainer's own memory unless a cast made new bytes.
"""

from collections.abc import Sequence

import xxhash

from rollout_client.channel import Channel
from rollout_client.copying import WIRE_DTYPE, blocks, source_view
from rollout_client.protocol import Chunk, Copy, Placement
from rollout_client.tensors import Array, Source
from rollout_client.transport import Reporter, Transport, by_part

FRAME_BYTES = 2 << 20


class ZmqTransport(Transport):
    """Sends chunks through the publisher's channel, from its thread."""

    name = "zmq"

    def __init__(self, channel: Channel, max_frame: int) -> None:
        """max_frame: the store's cap, bytes."""
        self._channel = channel
        self._frame = min(FRAME_BYTES, max_frame)

    def stage(self, placement: Placement, sources: Sequence[Source], reporter: Reporter) -> None:
        """See Transport."""
        for part, copies in by_part(placement.copies):
            flat = sources[part].load()
            for number, copy in copies:
                self._send(number, copy, flat, sources[part].part.dtype, reporter)
        reporter.flush()

    def _send(self, number: int, copy: Copy, flat: Array, src_dtype: str, reporter: Reporter) -> None:
        state = xxhash.xxh3_64()
        sent = 0
        limit = self._frame // WIRE_DTYPE[copy.dst_dtype].itemsize
        for _, block in blocks(source_view(flat, copy), src_dtype, copy.dst_dtype, limit, fresh=True):
            raw = block.reshape(-1).data.cast("B")
            state.update(raw)
            while not self._channel.ready(reporter.patience_s):
                reporter.turn()
            self._channel.send(Chunk(reporter.session, number, sent, [len(raw)]), [raw], timeout_s=reporter.left_s)
            reporter.moved(len(raw))
            reporter.turn()
            sent += len(raw)
        reporter.written(number, state.intdigest(), sent)
