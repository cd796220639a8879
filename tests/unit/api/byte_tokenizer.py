"""A tokenizer whose tokens are bytes, so that a test can read ids."""

from collections.abc import Sequence
from typing import Any

VOCAB = 300
EOS = 256


class ByteTokenizer:
    """Token = byte of UTF-8; ids from 256 on are special and have the text <id>."""

    eos_token_ids = (EOS,)
    longest_token = 5

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        out = bytearray()
        for token_id in ids:
            if token_id < 256:
                out.append(token_id)
            elif not skip_special:
                out += f"<{token_id}>".encode()
        return out.decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> str:
        return "".join(f"{m['role'][0]}:{m['content']};" for m in messages) + "a:"

    def stream(self, skip_special: bool = True) -> "ByteStream":
        return ByteStream(self, skip_special)


class ByteStream:
    def __init__(self, tokenizer: ByteTokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip, self._ids, self._given = tokenizer, skip_special, [], ""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids, self._skip)
        if text.endswith("\ufffd"):
            return ""
        piece, self._given = text[len(self._given) :], text
        return piece
