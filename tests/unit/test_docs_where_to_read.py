"""docs/architecture.md: the files that a reader opens to follow a tensor, an update and a request."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WAYS = re.findall(
    r"^\*\*(A tensor|An update|A request)\*\*.*?(\d+) files\.\n\n(.*?)\n\n",
    (ROOT / "docs/architecture.md").read_text(),
    re.M | re.S,
)

MESSAGES = ("rollout_client/protocol.py", "weight_manager/messages.py", "worker/messages.py")
"""What stands between two processes of a way, where a table says what is said and not how."""


@pytest.mark.parametrize(("name", "count", "table"), WAYS, ids=[name for name, *_ in WAYS])
def test_every_listed_file_is_there_and_counted(name: str, count: str, table: str) -> None:
    rows = re.findall(r"^\| (\d+) \| `([^`]+)` \|", table, re.M)
    assert [int(number) for number, _ in rows] == list(range(1, int(count) + 1))
    assert [file for _, file in rows if not (ROOT / file).is_file()] == []


def test_there_are_three_ways() -> None:
    assert [name for name, *_ in WAYS] == ["A tensor", "An update", "A request"]


def imports(file: str) -> set[str]:
    """Files that a file imports, as far as they are ours."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return {name.replace(".", "/") + ".py" for name in found}


@pytest.mark.parametrize(("name", "count", "table"), WAYS, ids=[name for name, *_ in WAYS])
def test_every_listed_file_is_one_step_from_another(name: str, count: str, table: str) -> None:
    files = re.findall(r"^\| \d+ \| `([^`]+)` \|", table, re.M)
    known = {file: imports(file) & {*files, *MESSAGES} - {file} for file in files}
    alone = [file for file in files if not known[file] and not any(file in others for others in known.values())]
    assert alone == []
