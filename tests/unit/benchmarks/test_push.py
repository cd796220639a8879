"""The push benchmark's own parts, on a few hundred kilobytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.push import limits, same_host, source
from benchmarks.push.peers import pair

ROOT = Path(__file__).parents[3]
SHAPES = {"a": (100, 300), "b": (7,), "c": (64, 1000)}


@pytest.fixture
def path(tmp_path):
    return source.write(tmp_path, SHAPES)


def test_everybody_reads_the_same_tensors(path):
    flat, tensors = source.read(path)
    assert {name: a.shape for name, a in tensors.items()} == SHAPES
    assert flat.nbytes == sum(a.nbytes for a in tensors.values()) == path.stat().st_size
    before = source.checksum(tensors)
    other = {name: a.copy() for name, a in tensors.items()}
    assert source.checksum(other) == before
    other["b"][3] += 1
    assert source.checksum(other) != before


def test_limits_are_times(path):
    assert all(seconds > 0 for seconds in limits.copy_seconds(path).values())
    assert limits.tcp_seconds(path) > 0


@pytest.mark.parametrize("peer", ["safetensors_file", "zmq_frames", "zmq_recv_into"])
def test_a_peer_moves_every_byte(path, peer):
    assert same_host.run_peer(peer, Path(sys.executable), path, dict(os.environ)) > 0


def test_a_peer_that_loses_bytes_is_found_out(path):
    receiver = "print('ready', flush=True); print('done', flush=True); print(1, flush=True)"
    with subprocess.Popen([sys.executable, "-c", receiver], stdout=subprocess.PIPE, text=True) as child:
        sender = type("Sender", (), {"send": lambda self: None})()
        with pytest.raises(SystemExit, match="other bytes"):
            pair._send(sender, child, path, 1)


def test_ratios_are_taken_within_a_round():
    def one(a, push, peer):
        total = {"total": push}
        return {
            "limit_a": {"flat": a, "by_tensor": a},
            "limit_t": a,
            "push_shm": total,
            "push_tcp": total,
            "zmq_frames": peer,
        }

    rounds = [one(1.0, 2.0, 4.0), one(10.0, 20.0, 40.0), one(2.0, 4.0, 8.0)]
    found = same_host.summary({"rounds": rounds, "first_push_of_a_trainer_s": 5.0, "first_push_of_all_s": 4.0})
    assert found["limit_a_over_push"] == 0.5
    assert found["peer_over_push"] == {"zmq_frames": 2.0}
    assert found["best_peer_over_push"] == 2.0
    assert found["first_over_warm"] == 1.25
    json.dumps(found)
    assert np.isfinite(found["seconds"]["push_shm"])
