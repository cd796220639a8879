"""A short chaos run, always the same one; `make chaos` has the long ones."""

import argparse

import pytest

from tests.chaos.report import run_and_report

SECONDS = 15.0
KINDS = {"kill", "stop", "pause", "clear"}


@pytest.mark.slow
@pytest.mark.timeout(180)  # alone it takes half a minute
@pytest.mark.parametrize(
    ("seed", "replicas", "stores", "kinds", "on_devices"),
    [(5, 2, 1, KINDS, False), (42, 1, 2, KINDS | {"cut"}, False), (54, 2, 1, KINDS, True)],
    ids=["alone", "tree", "devices"],
)
def test_nothing_is_torn_lost_hung_or_left_behind(tmp_path, seed, replicas, stores, kinds, on_devices):
    options = argparse.Namespace(
        seed=seed,
        seconds=SECONDS,
        clients=8,
        every_s=1.5,
        think_s=0.2,
        replicas=replicas,
        tp=1,
        api_workers=1,
        stores=stores,
        on_devices=on_devices,
        out=tmp_path / "chaos.json",
    )
    report = run_and_report(options, say=print)
    assert report["violations"] == []
    assert report["torn_samples"] == report["hung"] == 0
    assert report["tokens_replayed"] > 1000
    for committed in ("committed", "policy-a committed", "policy-b committed"):
        assert report["pushes"][committed] >= 3
    assert min(report["samples_of_adapters"], report["samples_held_to_a_pattern"]) > 10
    assert {fault["what"] for fault in report["faults"]} == kinds
    assert (report["samples_of_hosts_below"] > 10) == (stores > 1)
    assert (report["live_ahead"] > 0) == on_devices
