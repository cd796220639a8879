"""A service starts quickly, costs nothing while idle, and leaves nothing behind however it ends."""

import os
import signal
from urllib.parse import urlsplit

import pytest

from tests.fake_engine import ENGINE
from tests.integration.live import LiveService
from tests.processor import calm
from tests.reference.checkpoint import Checkpoint

READY_BAR_S = 6.0
IDLE_WAKES = 30.0


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


def test_a_service_told_to_stop_hands_over_what_running_requests_have(tiny: Checkpoint) -> None:
    paced = ("--set", ENGINE, "--set", 'worker.engine_options={"step_s": 0.02}')  # none can end before the pause
    live = LiveService(tiny.directory, "--set", "api.shutdown_s=0.2", *paced)
    try:
        live.start()
        with live.client() as client, live.client() as other:
            streams = [
                client.stream(prompt_ids=[1, 2, 3], max_tokens=200, ignore_eos=True),
                other.stream(prompt_ids=[4, 5, 6], n=4, max_tokens=200, ignore_eos=True),
            ]
            pieces = [[next(stream)] for stream in streams]
            with live.client() as operator:
                operator.pause(mode="keep")  # frozen in the middle, so that none can end by itself
            live.process.send_signal(signal.SIGTERM)
            for stream, sofar in zip(streams, pieces, strict=True):
                sofar += list(stream)
        for sofar in pieces:
            assert {output.finish_reason for piece in sofar for output in piece.outputs} == {None, "abort"}
            assert sum(len(output.token_ids) for piece in sofar for output in piece.outputs) > 0
        assert live.stop() == 0
        assert "Traceback" not in live.log.read_text()
        assert "killed" not in live.log.read_text()
        live.assert_nothing_left()
    finally:
        live.close()


def test_a_taken_port_or_a_tp_that_does_not_fit_is_refused_in_one_line(service: LiveService, tiny: Checkpoint) -> None:
    taken = urlsplit(service.url).port
    for arguments, reason in [
        (("--port", str(taken)), f"cannot listen on 127.0.0.1:{taken}: Address already in use; choose another --port"),
        (("--push-endpoint", service.push_endpoint), "choose another --push-endpoint"),
        (("--tp", "7"), "tp 7 is above the"),
    ]:
        second = LiveService(tiny.directory, *arguments)
        with pytest.raises(AssertionError, match="ended with 2"):
            second.start()
        assert reason in second.log.read_text().splitlines()[-1]
        assert len(second.log.read_text().splitlines()) == 1
        second.close()


def test_an_idle_service_uses_next_to_no_processor(service: LiveService) -> None:
    with service.client() as client:
        client.generate(prompt_ids=[1, 2, 3], max_tokens=4)
    calm(service.processes, IDLE_WAKES, window_s=6.0)
