"""Nodes with addresses of their own: what crosses which wire, and what a power loss does."""

import os
import shutil

import pytest

from tests.ray import scenario

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.slow,
    pytest.mark.skipif("RAY_TESTS" not in os.environ, reason="minutes long: make ray-test runs it"),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
]


def test_the_fleet_changes_as_one_over_a_power_loss_and_a_late_node():
    pytest.importorskip("ray", reason="pip install 'paddle-rollout[ray]'")
    facts = scenario.run(pushes=16, kill_at=5, add_at=9, gap_s=0.5)
    assert facts["answers"] > scenario.ANSWERS, facts
    assert facts["answers_of_several_versions"] > 0, facts
    assert facts["stale_after_told"] == facts["stale_after_seen"] == 0, facts
    assert facts["copies_per_push_max"] < 1.05, facts
    assert facts["replicas"][-1] == 3, facts
