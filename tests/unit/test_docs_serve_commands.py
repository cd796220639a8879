"""The commands in the docs that start a service: what they configure is not refused, and a page that has a trainer come
from another host binds there."""

import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli import app, serve_command
from api.config import compose
from tests.reference.checkpoint import Checkpoint

ROOT = Path(__file__).parents[2]
COMMANDS = [
    pytest.param(shlex.split(line.replace("\\\n", " "), comments=True)[1:], id=f"{page.stem}-{number}")
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    for number, line in enumerate(re.findall(r"^paddle-rollout serve(?:[^\n]|(?<=\\)\n)*", page.read_text(), re.M))
]


@pytest.mark.parametrize("words", COMMANDS)
def test_what_a_page_says_is_not_refused(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "MODEL").symlink_to(Checkpoint.random(tmp_path / "checkpoint", 1).directory)
    for option, value in itertools.pairwise(words):
        if option.endswith("-token-file"):
            (tmp_path / value).write_text(option)
    made = []

    def run(*what: Any) -> int:
        made.append(compose(serve_command.chosen(*what)))
        return 0

    monkeypatch.setattr(serve_command, "run", run)
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (config,) = made
    if "0.0.0.0" in words:
        assert config.store.push_endpoint.startswith("tcp://0.0.0.0"), "a trainer there cannot push"


def test_some_are_found() -> None:
    assert len(COMMANDS) >= 5
