"""deploy/k8s: valid by the API server's own schemas, rendered as kubectl renders it, and consistent in itself."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import validate
from typer.testing import CliRunner

from api.cli import app
from worker.config import WorkerConfig

K8S = Path(__file__).parents[2] / "deploy/k8s"
OLDEST, NEWEST = "1.27", "1.34"
CUSTOM = {"ServiceMonitor"}
"""Kinds that an operator brings; Kubernetes has no schema of theirs."""

Objects = dict[tuple[str, str], dict[str, Any]]


def load(paths: list[Path]) -> Objects:
    found = [document for path in paths for document in yaml.safe_load_all(path.read_text())]
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def resources(name: str) -> list[Path]:
    kustomization = yaml.safe_load((K8S / name / "kustomization.yaml").read_text())
    return [K8S / name / resource for resource in kustomization["resources"] if resource.endswith(".yaml")]


@pytest.fixture(scope="module")
def base() -> Objects:
    return load(resources("base"))


@pytest.fixture(scope="module")
def pod(base: Objects) -> dict[str, Any]:
    return base["Deployment", "rollout"]["spec"]["template"]


@pytest.fixture(scope="module")
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    return only


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_valid_with_no_unknown_field(base: Objects, version: str) -> None:
    for one in base.values():
        validate(one, version, strict=True)


@pytest.mark.parametrize("overlay", ["base", "monitoring", "gpu"])
def test_kubectl_renders_it_to_valid_objects(overlay: str) -> None:
    if not shutil.which("kubectl"):
        pytest.skip("no kubectl here: install one, of 1.22 or later, which knows labels in a kustomization")
    rendered = subprocess.run(["kubectl", "kustomize", K8S / overlay], capture_output=True, text=True, check=True)
    objects = list(yaml.safe_load_all(rendered.stdout))
    for one in objects:
        assert one["metadata"]["labels"]["app.kubernetes.io/name"] == "paddle-rollout"
        if one["kind"] not in CUSTOM:
            validate(one, NEWEST, strict=True)
    assert {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= {one["kind"] for one in objects}


def test_every_file_is_part_of_something() -> None:
    used = {path for name in ("base", "monitoring", "gpu") for path in resources(name)}
    for name in ("monitoring", "gpu"):
        kustomization = yaml.safe_load((K8S / name / "kustomization.yaml").read_text())
        used |= {K8S / name / patch["path"] for patch in kustomization["patches"]}
    assert used == {path for path in K8S.rglob("*.yaml") if path.name != "kustomization.yaml"}


def test_selectors_select_the_pod_and_ports_exist(
    base: Objects, pod: dict[str, Any], container: dict[str, Any]
) -> None:
    labels = pod["metadata"]["labels"].items()
    selectors = [
        base["Deployment", "rollout"]["spec"]["selector"]["matchLabels"],
        base["PodDisruptionBudget", "rollout"]["spec"]["selector"]["matchLabels"],
        base["NetworkPolicy", "rollout"]["spec"]["podSelector"]["matchLabels"],
        base["Service", "rollout"]["spec"]["selector"],
        base["Service", "rollout-push"]["spec"]["selector"],
    ]
    for selector in selectors:
        assert selector.items() <= labels
    ports = {port["name"] for port in container["ports"]}
    targets = [
        port["targetPort"] for name in ("rollout", "rollout-push") for port in base["Service", name]["spec"]["ports"]
    ]
    assert set(targets) == ports
    assert {
        port["port"] for rule in base["NetworkPolicy", "rollout"]["spec"]["ingress"] for port in rule["ports"]
    } == ports


def test_the_port_that_trainers_are_told_is_open(base: Objects) -> None:
    """The store tells them its number, whatever a Service maps it to."""
    container = base["Deployment", "rollout"]["spec"]["template"]["spec"]["containers"][0]
    (told,) = [int(arg.rpartition("=")[2]) for arg in container["args"] if arg.startswith("--set=store.data_port=")]
    assert {p["name"]: p["containerPort"] for p in container["ports"]}["data"] == told
    assert {p["name"]: p["port"] for p in base["Service", "rollout-push"]["spec"]["ports"]}["data"] == told


def test_monitoring_lets_in_whom_the_base_lets_in_and_prometheus(base: Objects) -> None:
    """Lists of a NetworkPolicy have no merge key: a patch that is a part of the object replaces them whole."""
    rules = base["NetworkPolicy", "rollout"]["spec"]["ingress"]
    patched = list(rules)
    for patch in yaml.safe_load((K8S / "monitoring/kustomization.yaml").read_text())["patches"]:
        said = yaml.safe_load((K8S / "monitoring" / patch["path"]).read_text())
        if isinstance(said, dict):
            patched = said["spec"]["ingress"]
            continue
        assert patch["target"] == {"kind": "NetworkPolicy", "name": "rollout"}
        assert [(one["op"], one["path"]) for one in said] == [("add", "/spec/ingress/-")]
        patched += [one["value"] for one in said]
    assert [rule for rule in rules if rule not in patched] == []
    anywhere = {"from": [{"namespaceSelector": {}}], "ports": [{"port": "http"}]}
    assert [rule for rule in patched if rule not in rules] == [anywhere]
    validate(base["NetworkPolicy", "rollout"] | {"spec": {"podSelector": {}, "ingress": patched}}, NEWEST, strict=True)


def test_the_service_monitor_finds_the_http_service_alone(base: Objects) -> None:
    monitor = load([K8S / "monitoring/service-monitor.yaml"])["ServiceMonitor", "rollout"]["spec"]
    wanted = monitor["selector"]["matchLabels"].items()
    name = {"app.kubernetes.io/name": "paddle-rollout"}
    found = [
        one
        for (kind, _), one in base.items()
        if kind == "Service" and wanted <= (one["metadata"]["labels"] | name).items()
    ]
    assert [one["metadata"]["name"] for one in found] == ["rollout"]
    assert monitor["endpoints"][0]["port"] in {port["name"] for port in found[0]["spec"]["ports"]}


def test_probes_ask_what_they_mean(container: dict[str, Any]) -> None:
    assert container["livenessProbe"]["httpGet"]["path"] == container["startupProbe"]["httpGet"]["path"] == "/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_shared_memory_is_memory_and_counted(pod: dict[str, Any], container: dict[str, Any]) -> None:
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert set(mounts) == {"/model", "/state", "/run/secrets/rollout", "/dev/shm", "/tmp"}
    shm = mounts["/dev/shm"]["emptyDir"]
    assert shm["medium"] == "Memory"
    sizes = [shm["sizeLimit"], container["resources"]["limits"]["memory"]]
    size, limit = (int(text.removesuffix("Gi")) for text in sizes)
    assert size < limit


def test_it_can_do_nothing_it_need_not(pod: dict[str, Any], container: dict[str, Any]) -> None:
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_variables_of_services_are_not_taken_for_options(pod: dict[str, Any]) -> None:
    assert pod["spec"]["enableServiceLinks"] is False


def test_its_arguments_are_options_and_its_grace_is_enough(pod: dict[str, Any], container: dict[str, Any]) -> None:
    """The command line gets as far as looking for the checkpoint."""
    tried = CliRunner().invoke(app, container["args"])
    assert "no such option" not in tried.output.lower()
    assert tried.exit_code != 0
    assert pod["spec"]["terminationGracePeriodSeconds"] > 4 * WorkerConfig.model_fields["drain_s"].default
