"""What ends a generation by the checkpoint's own word: everything that any of its files calls an end.

Files disagree: config.json of a chat model often knows only the end of a document, the tokenizer the end of a turn,
and generation_config.json both or one of them. A model that was trained to end with one of them ends with it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from worker.json_files import read_object

_IDS = ("config.json", "generation_config.json")
_NAMED = ("special_tokens_map.json", "tokenizer_config.json")
_TOKENS = ("eos_token", "eot_token")
"""Keys of tokens that end a text, or a turn where that is another token (a key of its own, or in extra_special_tokens).
"""


def end_tokens(model_dir: Path, id_of: Callable[[str], int | None]) -> dict[int, list[str]]:
    """Token id -> what names it, as `file: key`. id_of: of a token's spelling, None for one that is not known.

    Raises ValueError for a file that is no JSON object, or whose eos_token_id is neither a number nor a list of them.
    """
    found: dict[int, list[str]] = {}
    for file in _IDS:
        for token_id in _ids(model_dir / file):
            found.setdefault(token_id, []).append(f"{file}: eos_token_id")
    for file in _NAMED:
        document = read_object(model_dir / file)
        extra = document.get("extra_special_tokens")
        for key in _TOKENS:
            token = spelling(document, key) or (spelling(extra, key) if isinstance(extra, dict) else None)
            known = None if token is None else id_of(token)
            if known is not None:
                found.setdefault(known, []).append(f"{file}: {key} {token}")
    return found


def spelling(document: Mapping[str, Any], key: str) -> str | None:
    """A special token; it is written as a string, or as an object with a content."""
    value = document.get(key)
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def described(ends: Mapping[int, list[str]]) -> str:
    """The end tokens in words, for the log."""
    return "; ".join(f"{token_id} ({', '.join(sources)})" for token_id, sources in ends.items()) or "nothing but limits"


def _ids(path: Path) -> list[int]:
    value = read_object(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise ValueError(f"{path}: eos_token_id is a token id or a list of them, not {value!r}")
    return ids
