"""Schemathesis against the service's own OpenAPI: no 5xx, and no reply or event that its schema does not describe.

What it says is left in out/schemathesis/.

One run per group of routes, each against a service of its own, so that each takes minutes and all of them cover
every operation. Requests are held, not refused, while generation is paused: the routes that pause, release or open
an update are a group apart from those that wait for tokens.
"""

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.acceptance.conftest import CLIENTS
from tests.acceptance.tools import client_program, takes_minutes
from tests.integration.conftest import running
from tests.integration.live import LiveService

EXAMPLES = int(os.environ.get("ACCEPTANCE_EXAMPLES", "200"))
RUN_S = 1800
"""Longest run of a group: minutes of a machine that has time."""
STOPPING = re.compile(
    "/(v1/)?(rollout/)?(areal_)?(pause|resume|continue|sleep|wake|memory|release_memory|clear_load|update_model_weight|"
    "start_weight|finish_weight|shutdown_weight).*"
)
MEMORY = re.compile("sleep|wake|memory|clear_load|update_model_weight")
"""Of those: each call maps or drops weights and KV cache on every rank, which takes its time."""
GENERATING = re.compile("/v1/rollout/generate|/v1/completions|/v1/chat/completions|/inference/v1/generate|/generate")
ENDLESS = "/ui/events"
"""An event stream that never ends. tests/unit/api/test_ui.py reads it."""
PLAIN_EVERY = 16
"""What is sent to a route that generates is a plain request so often (clients/schemathesis_hooks.py)."""
OUT = Path(__file__).parents[2] / "out" / "schemathesis"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
GROUPS = [
    "generate, text",
    "generate, tokens",
    "native",
    "openai",
    "vllm",
    "sglang",
    "fastdeploy",
    "pages",
    "pauses",
    "memory",
]

pytestmark = [takes_minutes, pytest.mark.timeout(RUN_S + 100)]


@pytest.fixture
def short_service(qwen2: Path) -> Iterator[LiveService]:
    """Whose longest answer is short."""
    yield from running(qwen2, "--max-model-len", "64", "--replicas", "1")


def group_of(path: str, tag: str) -> str:
    """Which group an operation is tested in; every operation is in one of them."""
    if GENERATING.fullmatch(path):
        return "generate, text" if "completions" in path else "generate, tokens"
    if STOPPING.fullmatch(path):
        return "memory" if MEMORY.search(path) else "pauses"
    return {"rollout": "native", "health": "pages", "status page": "pages"}.get(tag, tag)


def operations(document: dict[str, Any], group: str) -> list[tuple[str, str]]:
    """(method, path) of each operation of a group."""
    return [
        (method.upper(), path)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if path != ENDLESS and group_of(path, operation["tags"][0]) == group
    ]


@pytest.mark.parametrize("group", GROUPS)
def test_every_route_keeps_to_its_schema(short_service: LiveService, group: str, tmp_path: Path) -> None:
    document = httpx.get(f"{short_service.url}/openapi.json", timeout=60.0).json()
    assert sum(len(operations(document, each)) for each in GROUPS) == sum(map(len, document["paths"].values())) - 1
    chosen = operations(document, group)
    tool = client_program("schemathesis", "schemathesis")
    command = [str(tool), "--no-color", "run", f"{short_service.url}/openapi.json", "--checks", CHECKS]
    command += ["--max-examples", str(EXAMPLES), "--phases", "examples,coverage,fuzzing"]
    command += ["--workers", "1"]  # of several, Python 3.11 breaks one: ast.parse fails in threads side by side
    command += ["--mode", "all", "--request-timeout", "60", "--seed", "1", "--generation-database", "none"]
    command += ["--continue-on-failure", "--suppress-health-check", "all", "--warnings", "off"]
    har = tmp_path / "har.json"
    command += ["--report", "har", "--report-har-path", str(har)]
    for method, path in chosen:
        command += ["--include-name", f"{method} {path}"]
    hooks = {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(CLIENTS)}
    OUT.mkdir(parents=True, exist_ok=True)
    log = OUT / f"{group.replace(', ', '-')}.log"  # to be read while it runs
    with log.open("w") as out:
        done = subprocess.run(
            command, check=False, stdout=out, stderr=out, cwd=tmp_path, env=os.environ | hooks, timeout=RUN_S
        )
    said = log.read_text(errors="replace")
    print(said[-1500:])
    assert done.returncode == 0, said[-12000:]
    assert f"Tested: {len(chosen)}\n" in said
    answers = Counter(
        (urlsplit(entry["request"]["url"]).path, entry["response"]["content"].get("mimeType", "").partition(";")[0])
        for entry in json.loads(har.read_text())["log"]["entries"]
        if entry["response"]["status"] == 200
    )
    for _, path in chosen if group.startswith("generate") else []:
        # Not only errors were looked at: of the plain requests among those that were sent most were answered.
        assert answers[path, "application/json"] >= EXAMPLES // PLAIN_EVERY // 4, answers
        assert answers[path, "text/event-stream"] >= EXAMPLES // PLAIN_EVERY // 4, answers
