"""Every metric that an alert rule or the dashboard asks for is in the scrape of a live service."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from rollout_client.errors import InvalidPush
from tests.fake_engine import ENGINE
from tests.integration.conftest import running
from tests.integration.live import LiveService
from tests.reference.checkpoint import Checkpoint

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules" / "rollout.yml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "rollout.json"
NAME = re.compile(r"\b(?:rollout_[a-z0-9_]+|vllm:[a-z_]+)")
LABELS = re.compile(r'([a-z_]+)\s*(?:=~|!=|=)\s*"')
PROMETHEUS_ADDS = {"instance", "job"}


@pytest.fixture(scope="module")
def samples(tiny: Checkpoint) -> Iterator[dict[str, set[str]]]:
    """Sample name -> its label names, after requests, a push, a refused push and a pause."""
    flags = ("--set", ENGINE, "--set", "api.vllm_metrics=true")
    for live in running(tiny.directory, *flags):
        yield scrape(live, tiny)


def scrape(live: LiveService, tiny: Checkpoint) -> dict[str, set[str]]:
    with live.client() as client, live.publisher("run") as publisher:
        client.generate(prompt_ids=[[1, 2, 3]] * 2, max_tokens=8, ignore_eos=True)
        publisher.push(tiny.weights, version=1)
        with pytest.raises(InvalidPush):
            publisher.push(
                dict(tiny.weights) | {"model.norm.weight": tiny.weights["model.norm.weight"][:-1]}, version=2
            )
        client.pause(mode="keep")
        client.resume()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(httpx.get(f"{live.url}/metrics", timeout=30.0).text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def alerts() -> list[str]:
    """Of every rule."""
    return [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def queries() -> list[str]:
    """Of every rule, panel, annotation and variable."""
    document = json.loads(DASHBOARD.read_text())
    found = alerts() + [target["expr"] for panel in panels() for target in panel["targets"]]
    found += [annotation["expr"] for annotation in document["annotations"]["list"]]
    variables = document["templating"]["list"]
    return found + [one["query"]["query"] for one in variables if one["type"] == "query"]


def test_every_metric_asked_for_exists(samples: dict[str, set[str]]) -> None:
    asked = {name for query in queries() for name in NAME.findall(query)}
    assert len(asked) > 35
    assert asked - samples.keys() == set()


def test_every_label_asked_for_exists(samples: dict[str, set[str]]) -> None:
    """In matchers, and in the legends of panels."""
    known = set().union(*samples.values()) | PROMETHEUS_ADDS
    for query in queries():
        assert set(LABELS.findall(query)) <= known, query
    legends = " ".join(target["legendFormat"] for panel in panels() for target in panel["targets"])
    assert set(re.findall(r"\{\{(\w+)\}\}", legends)) <= known


def test_what_the_service_must_say_is_there(samples: dict[str, set[str]]) -> None:
    said = """weight_version version_skew live_age_seconds push_phase_seconds_bucket push_bytes push_failures_total
        paused paused_seconds_total held_requests running_sequences preempted_sequences_total finished_sequences_total
        tokens_total staleness_versions_bucket prefix_hit_tokens_total step_seconds_bucket ttft_seconds_bucket
        itl_seconds_bucket rank_up"""
    assert {f"rollout_{name}" for name in said.split()} - samples.keys() == set()
    aliases = """num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions_total
        prefix_cache_hits_total prefix_cache_queries_total prompt_tokens_total generation_tokens_total
        time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket
        cache_config_info rl_weight_update_operation_duration_seconds_bucket"""
    assert {f"vllm:{name}" for name in aliases.split()} - samples.keys() == set()
    assert {"num_gpu_blocks", "block_size"} <= samples["vllm:cache_config_info"]


def test_what_an_alert_looks_at_has_a_panel_too() -> None:
    """Whoever is woken up sees when it began, and what else happened then."""
    shown = {name for panel in panels() for target in panel["targets"] for name in NAME.findall(target["expr"])}
    assert {name for query in alerts() for name in NAME.findall(query)} - shown == set()


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert panel["description"]
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_compose_mounts_what_grafana_and_prometheus_are_told_to_read() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounts = {}
    for name in ("grafana", "prometheus"):
        for volume in services[name]["volumes"]:
            source, target = volume.split(":")[:2]
            mounts[target] = DEPLOY / source
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/rollout.yaml").read_text())["providers"][0]
    inside = Path(provider["options"]["path"])
    assert (mounts[str(inside.parent)] / inside.name / DASHBOARD.name).samefile(DASHBOARD)
    (pattern,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["rule_files"]
    where = Path(pattern).relative_to("/etc/prometheus")
    assert list(mounts["/etc/prometheus"].glob(str(where))) == [RULES]
