"""The compose files and what they mount, as data: every name that one file uses, another defines."""

import re
import stat
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from typer.testing import CliRunner

from api.cli import app

DEPLOY = Path(__file__).parents[2] / "deploy"
MOUNTED = {"/etc/prometheus": DEPLOY / "prometheus", "/etc/paddle-rollout/grafana": DEPLOY / "grafana"}


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return load(DEPLOY / "compose.yaml")["services"]


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    return load(DEPLOY / "compose.demo.yaml")["services"]


def words(command: str) -> list[str]:
    """With the defaults of its variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", command).split()


def test_profiles(services: dict[str, Any]) -> None:
    assert {name: one["profiles"] for name, one in services.items()} == {
        "rollout": ["cpu"],
        "rollout-gpu": ["gpu"],
        "prometheus": ["observability"],
        "grafana": ["observability"],
    }


def test_every_port_is_published_on_loopback_only(services: dict[str, Any]) -> None:
    assert all(port.startswith("127.0.0.1:") for one in services.values() for port in one["ports"])


def test_secrets_and_volumes_are_defined(services: dict[str, Any], demo: dict[str, Any]) -> None:
    files = [load(DEPLOY / name) for name in ("compose.yaml", "compose.demo.yaml")]
    secrets = {name for one in files for name in one.get("secrets", {})}
    volumes = {name for one in files for name in one["volumes"]}
    for one in [*services.values(), *demo.values()]:
        assert set(one.get("secrets", [])) <= secrets
        named = {volume.split(":")[0] for volume in one.get("volumes", []) if volume[0] not in "./$"}
        assert named <= volumes


def test_tokens_are_made_once_private_and_readable_by_containers(tmp_path: Path) -> None:
    where = tmp_path / "secrets"
    for _ in range(2):
        subprocess.run([DEPLOY / "make-secrets.sh", where], check=True)
        made = {path.name: path.read_text() for path in where.iterdir()}
    assert set(made) == set(load(DEPLOY / "compose.yaml")["secrets"])
    assert len(set(made.values())) == len(made)
    assert all(len(token) == 48 for token in made.values())
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    first = made
    subprocess.run([DEPLOY / "make-secrets.sh", where], check=True)
    assert {path.name: path.read_text() for path in where.iterdir()} == first


def test_the_command_is_one_of_ours(services: dict[str, Any]) -> None:
    tried = CliRunner().invoke(app, words(services["rollout"]["command"]))
    assert "no such option" not in tried.output.lower()


def test_the_port_that_trainers_are_told_is_open(services: dict[str, Any]) -> None:
    command = words(services["rollout"]["command"])
    (told,) = [word.rpartition("=")[2] for word in command if word.startswith("store.data_port=")]
    assert f"127.0.0.1:{told}:{told}" in services["rollout"]["ports"]


def test_trainers_find_the_service(demo: dict[str, Any]) -> None:
    for name in ("trainer", "trainer-shm"):
        command = words(demo[name]["command"])
        addresses = [urlsplit(command[command.index(flag) + 1]) for flag in ("--url", "--push-endpoint")]
        assert [(one.hostname, one.port) for one in addresses] == [("rollout", 8000), ("rollout", 5600)]
    assert demo["trainer-shm"]["ipc"] == "service:rollout"


def test_prometheus_scrapes_both_kinds_of_service(services: dict[str, Any]) -> None:
    config = load(DEPLOY / "prometheus/prometheus.yml")
    targets = [target for job in config["scrape_configs"] for one in job["static_configs"] for target in one["targets"]]
    assert targets == ["rollout:8000"]
    assert services["rollout-gpu"]["networks"]["default"]["aliases"] == ["rollout"]
    assert all(Path(rule).parent == Path("/etc/prometheus/rules") for rule in config["rule_files"])


def test_mounts_are_where_the_configuration_looks(services: dict[str, Any]) -> None:
    for one in (services["prometheus"], services["grafana"]):
        source, target, _ = one["volumes"][0].split(":")
        assert (DEPLOY / source).resolve() == MOUNTED[target]
    provisioning = services["grafana"]["environment"]["GF_PATHS_PROVISIONING"]
    assert provisioning == "/etc/paddle-rollout/grafana/provisioning"
    (provider,) = load(DEPLOY / "grafana/provisioning/dashboards/rollout.yaml")["providers"]
    assert provider["options"]["path"] == "/etc/paddle-rollout/grafana/dashboards"


def test_grafana_asks_the_prometheus_of_the_same_file(services: dict[str, Any]) -> None:
    (source,) = load(DEPLOY / "grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    address = urlsplit(source["url"])
    assert address.hostname in services
    assert services[address.hostname]["ports"][0].endswith(f":{address.port}")
