"""A step longer than every deadline of liveness: nobody is taken for dead, and nothing is done twice."""

import httpx
import pytest

from tests.fake_engine import ENGINE
from tests.integration.live import LiveService
from tests.reference.checkpoint import Checkpoint

SETTINGS = (ENGINE, 'worker.engine_options={"step_s": 6}', "worker.hang_s=2", "api.silence_s=1")
"""Of the fake engine, whose step stands for one of a large model: it goes from operation to operation for 6 s."""


@pytest.mark.timeout(120)
def test_a_replica_in_a_long_step_is_neither_lost_nor_ended(tiny: Checkpoint) -> None:
    live = LiveService(tiny.directory, *(word for setting in SETTINGS for word in ("--set", setting)))
    try:
        live.start()
        before = live.rank_zeros()
        with live.client() as client:
            (output,) = client.generate(prompt_ids=[1, 2, 3], max_tokens=2, ignore_eos=True).outputs
        assert (output.finish_reason, len(output.token_ids)) == ("length", 2)
        assert live.rank_zeros() == before
        assert 'rollout_replica_lost_total{replica="0"} 0.0' in httpx.get(f"{live.url}/metrics").text
        assert live.stop() == 0
        live.assert_nothing_left()
    finally:
        live.close()
