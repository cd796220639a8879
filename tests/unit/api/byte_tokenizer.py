"""A tokenizer whose tokens are bytes, so that a test can read ids."""

import codecs
from collections.abc import Sequence
from typing import Any

from worker.chat_template import Rendering

VOCAB = 300
EOS = 256
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
    "{% if messages and messages[-1].content == 'think' %}<think>\n{% endif %}"
)


class ByteTokenizer:
    """Token = byte of UTF-8; ids from 256 on are special and have the text <id>."""

    longest_token = 5
    ends = frozenset({EOS, 7})
    special_ids = frozenset(range(256, VOCAB))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        shown = (i for i in ids if i < 256 or not skip_special)
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")

    def has_template(self, name: str) -> bool:
        return False

    def rendering(
        self, messages: list[dict[str, Any]], /, *, chat_template: str | None = None, **variables: Any
    ) -> Rendering:
        return Rendering(chat_template or TEMPLATE, messages, variables)

    def special_id(self, text: str) -> int | None:
        return None

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else f"<{token_id}>".encode()

    def whole_text(self, token_id: int) -> str | None:
        return chr(token_id) if token_id < 128 else None

    def stream(self, skip_special: bool = True, kept: frozenset[str] = frozenset()) -> "ByteStream":
        return ByteStream(self, skip_special)


class ByteStream:
    def __init__(self, tokenizer: ByteTokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._reader = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        skipped = self._skip and token_id >= 256
        return "" if skipped else self._reader.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        return self._reader.decode(b"", final=True)

    @property
    def at_rest(self) -> bool:
        return not self._reader.getstate()[0]
