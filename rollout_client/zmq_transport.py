"""Any host: payload frames, which the store receives straight into the staged slot.

Frames of 256 KiB, four to a message: small enough for the receiver to copy while the next is on its way,
large enough that headers cost nothing. ZMQ sends from the trainer's own memory unless a cast made new bytes.
"""

from collections.abc import Sequence

import xxhash

from rollout_client.channel import Channel
from rollout_client.copying import WIRE_DTYPE, blocks, source_view
from rollout_client.protocol import Chunk, Copy, Placement
from rollout_client.tensors import Array, Source
from rollout_client.transport import Reporter, Transport, by_part

FRAME_BYTES = 256 << 10
FRAMES = 4


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
        limit = self._frame * FRAMES // WIRE_DTYPE[copy.dst_dtype].itemsize
        for _, block in blocks(source_view(flat, copy), src_dtype, copy.dst_dtype, limit, fresh=True):
            raw = block.reshape(-1).data.cast("B")
            state.update(raw)
            frames = [raw[i : i + self._frame] for i in range(0, len(raw), self._frame)]
            chunk = Chunk(reporter.session, number, sent, [len(f) for f in frames])
            while not self._channel.ready(reporter.patience_s):
                reporter.turn()
            self._channel.send(chunk, frames, timeout_s=reporter.left_s)
            reporter.moved(len(raw))
            reporter.turn()
            sent += len(raw)
        reporter.written(number, state.intdigest(), sent)
