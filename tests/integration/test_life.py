"""A service starts quickly, costs nothing while idle, and leaves nothing behind however it ends."""

import os
import signal
import time

import pytest

from tests.integration.live import LiveService
from tests.reference.checkpoint import Checkpoint

READY_BAR_S = 6.0
IDLE_BAR = 0.03
IDLE_WINDOW_S = 6.0
IDLE_WINDOWS = 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_and_a_second_start_works(tiny: Checkpoint, number: signal.Signals) -> None:
    live = LiveService(tiny.directory, "--replicas", "2")
    try:
        for _ in range(2):
            live.start()
            assert len(live.processes()) >= 5
            assert live.shared_memory()
            status = live.stop(number)
            assert status == (-signal.SIGKILL if number == signal.SIGKILL else 0), live.tail()
            live.assert_nothing_left()
    finally:
        live.close()


def test_it_is_ready_within_six_seconds(service: LiveService) -> None:
    """Of a processor of its own: time that other programs held it is taken off, against a tighter bar."""
    assert service.ready_s < READY_BAR_S or service.ready_s - service.ready_wait_s < READY_BAR_S - 1.5


@pytest.mark.parametrize("tp", [1, 2])
def test_a_replica_told_to_stop_finishes_what_it_runs(tiny: Checkpoint, tp: int) -> None:
    live = LiveService(tiny.directory, "--tp", str(tp))
    try:
        live.start()
        with live.client() as client:
            stream = client.stream(prompt_ids=[1, 2, 3], max_tokens=200, ignore_eos=True)
            pieces = [next(stream)]
            (leader,) = live.rank_zeros()
            os.kill(leader, signal.SIGTERM)
            pieces += list(stream)
        assert sum(len(piece.outputs[0].token_ids) for piece in pieces) == 200
        assert pieces[-1].outputs[0].finish_reason == "length"
        assert live.stop() == 0
        live.assert_nothing_left()
        assert "Termination signal" not in live.log.read_text(), "Paddle's handler aborted a rank"
    finally:
        live.close()


def test_an_idle_service_uses_next_to_no_processor(service: LiveService) -> None:
    with service.client() as client:
        client.generate(prompt_ids=[1, 2, 3], max_tokens=4)
    shares = []
    for _ in range(IDLE_WINDOWS):  # the first windows may still hold the start's last work, or a neighbour's noise
        used, started = service.cpu_s(), time.monotonic()
        time.sleep(IDLE_WINDOW_S)
        shares.append((service.cpu_s() - used) / (time.monotonic() - started))
        if shares[-1] < IDLE_BAR:
            return
    raise AssertionError(f"idle shares of a core: {shares}")
