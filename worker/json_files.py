"""The small JSON files beside a checkpoint's weights."""

import json
from pathlib import Path
from typing import Any

from weight_manager.checkpoint import POINTER, is_pointer


def read_object(path: Path) -> dict[str, Any]:
    """The file's JSON object; empty if there is no such file. Raises ValueError naming it."""
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} {POINTER}" if is_pointer(path) else f"{path}: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: not a JSON object")
    return document
