"""Schemathesis against the service's own OpenAPI: no 5xx, and no reply that its schema does not describe.

In two runs with services of their own. Requests are held, not refused, while generation is paused, so the
routes that pause, release or open an update are not mixed with those that wait for tokens.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.conftest import CLIENTS
from tests.acceptance.tools import client_program, takes_minutes
from tests.integration.conftest import running
from tests.integration.live import LiveService

EXAMPLES = int(os.environ.get("ACCEPTANCE_EXAMPLES", "200"))
STOPPING = (
    "/(v1/)?(rollout/)?(areal_)?(pause|resume|continue|sleep|wake|memory|release_memory|clear_load|update_model_weight|"
    "start_weight|finish_weight|shutdown_weight).*"
)
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"

pytestmark = [takes_minutes, pytest.mark.timeout(3600)]


@pytest.fixture
def short_service(qwen2: Path) -> Iterator[LiveService]:
    """Whose longest answer is short."""
    yield from running(qwen2, "--max-model-len", "32", "--replicas", "1")


@pytest.mark.parametrize("selection", ["--exclude-path-regex", "--include-path-regex"])
def test_every_route_keeps_to_its_schema(short_service: LiveService, selection: str, tmp_path: Path) -> None:
    tool = client_program("schemathesis", "schemathesis")
    command = [str(tool), "--no-color", "run", f"{short_service.url}/openapi.json", "--checks", CHECKS]
    command += [
        "--max-examples",
        str(EXAMPLES),
        "--phases",
        "examples,coverage,fuzzing",
        "--workers",
        "2",
        "--mode",
        "all",
    ]
    command += ["--request-timeout", "60", "--seed", "1", "--generation-database", "none"]
    command += ["--continue-on-failure", "--suppress-health-check", "all", "--warnings", "off"]
    # An event stream never ends.
    command += ["--exclude-path", "/ui/events", selection, f"^{STOPPING}$"]
    command += ["--exclude-path", "/ui/events"]  # a stream without an end
    hooks = {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(CLIENTS)}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path, env=os.environ | hooks, timeout=3500
    )
    print(done.stdout[-1500:])
    assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-2000:]
