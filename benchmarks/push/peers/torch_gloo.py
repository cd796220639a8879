"""torch.distributed over gloo: one broadcast per 128 MB of the source, which needs no packing. One thread."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.push import source
from benchmarks.push.peers.pair import Meeting, main

BUCKET = 128 << 20


class Rank:
    def __init__(self, meeting: Meeting, rank: int, flat: np.ndarray) -> None:
        torch.set_num_threads(1)
        rendezvous = f"tcp://127.0.0.1:{meeting.ports[0]}"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
        self._path, self._flat = meeting.path, flat
        self._buckets: list[Any] = [torch.from_numpy(flat[i : i + BUCKET]) for i in range(0, flat.size, BUCKET)]

    def send(self) -> None:
        for bucket in self._buckets:
            dist.broadcast(bucket, src=0)

    def receive(self) -> source.Tensors:
        self.send()
        return source.split(self._flat, self._path)


if __name__ == "__main__":
    main(
        lambda meeting: Rank(meeting, 0, source.read(meeting.path)[0]),
        lambda meeting: Rank(meeting, 1, np.zeros(meeting.path.stat().st_size, np.uint8)),
    )
