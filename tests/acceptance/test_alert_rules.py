"""Prometheus' own tool reads the rules, and runs their unit tests: each alert fires when it should and not before."""

import subprocess
from pathlib import Path

import yaml

from tests.acceptance.tools import tool

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules"


def promtool(*args: str | Path, **options: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool("promtool"), *args], capture_output=True, text=True, timeout=50, check=False, **options)


def test_promtool_accepts_the_rules() -> None:
    done = promtool("check", "rules", *RULES.glob("*.yml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_when_it_should_and_not_before() -> None:
    done = promtool("test", "rules", *(RULES / "tests").glob("*.yml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_unit_tests_notice_a_changed_rule(tmp_path: Path) -> None:
    """Each rule in turn with the wrong patience, or the opposite comparison."""
    rules = (RULES / "rollout.yml").read_text()
    cases = (RULES / "tests" / "rollout.yml").read_text().replace("../rollout.yml", "rollout.yml")
    (tmp_path / "cases.yml").write_text(cases)
    for index in range(len(yaml.safe_load(rules)["groups"][0]["rules"])):
        changed = yaml.safe_load(rules)
        rule = changed["groups"][0]["rules"][index]
        rule["expr"] = f"({rule['expr']}) and vector(1) == 2"
        (tmp_path / "rollout.yml").write_text(yaml.safe_dump(changed))
        done = promtool("test", "rules", "cases.yml", cwd=tmp_path)
        assert done.returncode != 0, f"nobody notices that {rule['alert']} never fires"
