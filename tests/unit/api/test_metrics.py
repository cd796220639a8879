from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api import store_metrics
from api.histogram import Histogram
from api.store_metrics import StoreSamples
from weight_manager.messages import Live, Status
from weight_manager.relay.messages import Holdings, VersionName
from weight_manager.relay.roster import Downstream


@pytest.fixture
def settings():
    return {"vllm_metrics": True}


async def scrape(client):
    reply = await client.get("/metrics")
    assert reply.status_code == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


async def test_a_scrape_says_what_the_fleet_and_the_store_are_doing(client, replicas, store, until, service):
    await client.post("/v1/rollout/generate", json={"prompt": "A", "max_tokens": 1})
    await client.post("/v1/rollout/generate", json={"prompt": ""})
    replicas[1].move("serving", 3)
    await until(lambda: service.fleet.replicas[1].version == 3)
    await client.post("/v1/rollout/pause")
    seen = await scrape(client)
    assert seen["rollout_version_skew", ()] == 3
    assert seen["rollout_weight_version", (("replica", "1"),)] == 3
    assert seen["rollout_replica_ready", (("replica", "1"),)] == 0
    assert seen["rollout_replica_state", (("replica", "0"), ("state", "paused"))] == 1
    assert seen["rollout_replica_state", (("replica", "0"), ("state", "serving"))] == 0
    assert seen["rollout_paused", ()] == 1
    assert seen["rollout_paused_seconds_total", ()] > 0
    assert seen["rollout_live_version", ()] == 0
    assert seen["rollout_store_connected", ()] == 1
    assert seen["rollout_store_commits_total", ()] == 1
    assert seen["rollout_step_seconds_count", (("replica", "0"),)] == 2
    assert seen["rollout_rank_rss_bytes", (("rank", "0"), ("replica", "0"))] == 1000
    assert seen["rollout_rank_up", (("rank", "0"), ("replica", "0"))] == 1
    assert seen["rollout_pause_age_seconds", ()] > 0
    assert seen["rollout_steps_total", (("replica", "0"),)] == 2
    assert seen["rollout_preempted_sequences_total", (("replica", "0"),)] == 0
    assert seen["rollout_push_failures_total", (("reason", "deadline"),)] == 0
    assert seen["rollout_tokens_total", (("outcome", "generation"), ("replica", "0"))] == 5
    assert seen["rollout_http_requests_total", (("route", "/v1/rollout/generate"), ("status", "200"))] == 1
    assert seen["rollout_http_requests_total", (("route", "/v1/rollout/generate"), ("status", "400"))] == 1


async def test_vllm_names(client):
    seen = await scrape(client)
    labels = (("engine", "0"), ("model_name", "tiny"))
    assert seen["vllm:kv_cache_usage_perc", labels] == pytest.approx(0.3)
    assert seen["vllm:generation_tokens_total", labels] == 5
    sizes = (("block_size", "16"), ("engine", "0"), ("model_name", "tiny"), ("num_gpu_blocks", "10"))
    assert seen["vllm:cache_config_info", sizes] == 1


async def test_a_dead_replica_leaves_no_numbers_behind(client, replicas, until, service):
    await replicas[0].die()
    await until(lambda: not service.fleet.replicas[0].link.up)
    seen = await scrape(client)
    assert seen["rollout_replica_lost_total", (("replica", "0"),)] == 1
    assert seen["rollout_replica_state", (("replica", "0"), ("state", "unreachable"))] == 1
    assert seen["rollout_rank_up", (("rank", "0"), ("replica", "0"))] == 0
    assert ("rollout_running_sequences", (("replica", "0"),)) not in seen


def test_stores_of_other_hosts():
    """Two below, one of them left behind by the running commit; and a store that has one above, without a lease."""
    behind = Downstream("s1", "b@h", b"1", Holdings(VersionName("run", 5, "d")), 0.0, behind={""})
    level = Downstream("s2", "c@h", b"2", Holdings(VersionName("run", 7, "d")), 0.0)
    live = Live("run", 7, 3, 0, "d", 1)
    below = {store.name: store.status(Holdings(VersionName("run", 7, "d")), 1.0) for store in (behind, level)}
    above = {"joined": True, "fenced": True, "in_doubt": False}
    seen = {
        (sample.name, *sample.labels.values()): sample.value
        for family in store_metrics.relay(
            status(live=live, relay={"below": below, "above": above, "sent_bytes": 1 << 40})
        )
        for sample in family.samples
    }
    assert (seen["rollout_relay_stores",], seen["rollout_relay_stores_unready",]) == (2, 1)
    assert (seen["rollout_relay_store_ready", "b@h"], seen["rollout_relay_store_ready", "c@h"]) == (0, 1)
    assert (seen["rollout_relay_store_fenced", "b@h"], seen["rollout_relay_store_lag_versions", "b@h"]) == (1, 2)
    assert (seen["rollout_relay_store_lag_versions", "c@h"], seen["rollout_relay_store_behind_bytes", "c@h"]) == (0, 0)
    assert seen["rollout_relay_sent_bytes_total",] == 1 << 40
    assert (seen["rollout_relay_joined",], seen["rollout_relay_fenced",], seen["rollout_relay_in_doubt",]) == (1, 1, 0)
    assert not list(store_metrics.relay(status()))


@pytest.mark.parametrize("lost", [None, Live("run", 7, 3, 0, "d", 1)])
def test_a_version_that_was_lost_is_said_until_it_is_made_good(lost):
    seen = {
        sample.name: sample.value
        for family in store_metrics.collect(
            SimpleNamespace(status=status(lost=lost), link=SimpleNamespace(up=True)), StoreSamples()
        )
        for sample in family.samples
    }
    assert seen["rollout_version_lost"] == (lost is not None)


def test_histogram_buckets_are_cumulative_and_inclusive():
    histogram = Histogram((1.0, 2.0))
    histogram.observe([0.5, 1.0, 1.5, 9.0])
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.sum == 12.0


def status(**changes):
    fields = {"live": None, "previous": None, "session": None, "replicas": {}, "history": [], "counters": {}}
    return Status(call="", **(fields | {"last_error": None, "last_push": None} | changes))


def test_pushes_and_failures_are_counted_once_each_and_not_those_before_us():
    samples = StoreSamples()
    old = {"epoch": 1, "seconds": {"stage": 1.0}}
    samples.observe(status(last_push=old, last_error={"time": 1.0, "code": "io"}))
    assert not any(h.sum for h in samples.phases.values())
    assert not any(samples.failures.values())
    new = status(
        last_push={"epoch": 2, "seconds": {"stage": 0.2, "commit": 0.1}},
        last_error={"time": 2.0, "code": "shape_mismatch"},
    )
    samples.observe(new)
    samples.observe(new)
    assert {phase: h.sum for phase, h in samples.phases.items() if h.sum} == {"stage": 0.2, "commit": 0.1}
    assert {reason: count for reason, count in samples.failures.items() if count} == {"shape_mismatch": 1}
