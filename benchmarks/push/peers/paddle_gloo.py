"""paddle.distributed over gloo: one broadcast per 128 MB of the source, which needs no packing."""

import os
from typing import Any

import numpy as np

from benchmarks.push import source
from benchmarks.push.peers.pair import Meeting, main

BUCKET = 128 << 20


class Rank:
    def __init__(self, meeting: Meeting, rank: int, flat: np.ndarray) -> None:
        master, *own = [f"127.0.0.1:{port}" for port in meeting.ports]
        os.environ |= {
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": "2",
            "PADDLE_TRAINER_ENDPOINTS": ",".join(own),
            "PADDLE_CURRENT_ENDPOINT": own[rank],
            "PADDLE_MASTER": master,
            "PADDLE_DISTRI_BACKEND": "gloo",
        }
        import paddle

        paddle.distributed.init_parallel_env()
        self._broadcast = paddle.distributed.broadcast
        self._path, self._flat = meeting.path, flat
        words = flat.view(np.float32)
        self._buckets: list[Any] = [
            paddle.utils.dlpack.from_dlpack(words[i : i + BUCKET // 4]) for i in range(0, words.size, BUCKET // 4)
        ]

    def send(self) -> None:
        for bucket in self._buckets:
            self._broadcast(bucket, src=0)

    def receive(self) -> source.Tensors:
        self.send()
        return source.split(self._flat, self._path)


if __name__ == "__main__":
    main(
        lambda meeting: Rank(meeting, 0, source.read(meeting.path)[0]),
        lambda meeting: Rank(meeting, 1, np.zeros(meeting.path.stat().st_size, np.uint8)),
    )
