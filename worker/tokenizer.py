"""Text <-> token ids of one checkpoint, without transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class TextStream(Protocol):
    """Incremental decoding of one sequence."""

    def push(self, token_id: int) -> str:
        """The text this token completes; "" while a character is unfinished."""
        ...


class Tokenizer:
    """Text of one checkpoint."""

    eos_token_ids: tuple[int, ...]

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """Read tokenizer.json and what lies beside it. Raises FileNotFoundError, ValueError."""
        raise NotImplementedError

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids."""
        raise NotImplementedError

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> str:
        """The prompt text of a conversation."""
        raise NotImplementedError

    def stream(self, skip_special: bool = True) -> TextStream:
        """A decoder fed one token at a time."""
        raise NotImplementedError
