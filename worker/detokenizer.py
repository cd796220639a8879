"""Token ids -> text, token by token, so that a stream and the whole are one text by construction.

Where the tokenizer's decoder is one whose tokens stand for bytes (byte-level BPE; sentencepiece with or without byte
fallback), every token becomes its bytes, and the bytes of all of them are read as UTF-8: a character is given out with
the token that completes it, also where that token goes on to begin another one. Other decoders are asked for windows
of ids, as long as what they said of them stands.

Bytes that are no UTF-8 are replaced by U+FFFD: byte-level as `tokenizers` does; byte fallback as sentencepiece does,
one for each such byte, with the characters around them kept (`tokenizers` gives up all the bytes in a row, and could
say nothing before their end).
"""

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tokenizers

_EACH_BYTE = "paddle_rollout.each_byte"


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _each_byte)


class TextStream(Protocol):
    """Text of one sequence as its tokens come."""

    def push(self, token_id: int) -> str:
        """The characters this token completes."""

    def finish(self) -> str:
        """What stands for a character that was never completed; nothing may be pushed after it."""

    @property
    def at_rest(self) -> bool:
        """Whether the text of a token that is whole (`Detokenizer.whole_text`) is all that pushing it would do now."""


@dataclass(frozen=True)
class _Spelling:
    """How a vocabulary spells bytes. of: a token's spelling -> its bytes. strip: leading spaces the text loses."""

    of: Callable[[str], bytes]
    errors: str
    strip: int = 0


class Detokenizer:
    """Text of ids of one tokenizer. An id that it does not know has none."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_ids = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._spelling = _spelling(json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None)
        self._bytes: dict[int, bytes] = {}
        self.whole: dict[int, str] = {}
        """Texts of the tokens met so far that are whole characters, whatever stands around them."""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token by itself stands for, special ones included: a part of a character, maybe."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id)
            if token is None:
                known = b""
            elif self._spelling is None:
                known = self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
            else:
                known = self._spelling.of(token)
            self._bytes[token_id] = known
        return known

    def whole_text(self, token_id: int) -> str | None:
        """Text of a token that is whole characters, whatever stands around it; None: it is not, or special."""
        if self._spelling is None or token_id in self.special_ids:
            return None
        try:
            return self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return None

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """The whole text: what the pieces of a stream and its end join to."""
        spelling = self._spelling
        if spelling is None:
            stream = self.stream(skip_special=skip_special)
            return "".join([*map(stream.push, ids), stream.finish()])
        shown = (i for i in ids if not (skip_special and i in self.special_ids))
        text = b"".join(map(self.token_bytes, shown)).decode("utf-8", spelling.errors)
        return text[_spaces(text, spelling.strip) :]

    def stream(self, *, skip_special: bool, kept: frozenset[str] = frozenset()) -> TextStream:
        """A decoder fed one token at a time. kept: special tokens whose text is not left out."""
        skipped = self.special_ids if skip_special else frozenset()
        shown = frozenset(i for i in skipped if kept and self._tokenizer.id_to_token(i) in kept)
        if self._spelling is None:
            return _Windows(self._tokenizer, skipped - shown)
        return _Bytes(self, self._spelling, skipped - shown)


class _Bytes:
    """See TextStream: of tokens that stand for bytes."""

    def __init__(self, detokenizer: Detokenizer, spelling: _Spelling, skipped: frozenset[int]) -> None:
        self._detokenizer = detokenizer
        self._skipped = skipped
        self._reader = codecs.getincrementaldecoder("utf-8")(spelling.errors)
        self._within = False  # a character, of which the reader has a part
        self._strip = spelling.strip

    def push(self, token_id: int) -> str:
        """See TextStream."""
        if token_id in self._skipped:
            return ""
        text = None if self._within else self._detokenizer.whole.get(token_id)
        if text is None:
            alone = not self._within
            text = self._reader.decode(self._detokenizer.token_bytes(token_id))
            self._within = bool(self._reader.getstate()[0])
            if alone and not self._within:
                self._detokenizer.whole[token_id] = text
        return self._stripped(text) if self._strip else text

    def finish(self) -> str:
        """See TextStream."""
        return self._stripped(self._reader.decode(b"", final=True))

    @property
    def at_rest(self) -> bool:
        """See TextStream."""
        return not (self._within or self._strip)

    def _stripped(self, text: str) -> str:
        if not self._strip or not text:
            return text
        spaces = _spaces(text, self._strip)
        self._strip = self._strip - spaces if spaces == len(text) else 0
        return text[spaces:]


class _Windows:
    """See TextStream: of any decoder. Decodes from the tokens of the last piece on, which the next may depend on."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window: list[int] = []
        self._given_ids = 0  # of the window
        self._given = ""  # their text

    def push(self, token_id: int) -> str:
        """See TextStream."""
        self._window.append(token_id)
        text = self._text(self._window)
        if text.endswith("\ufffd"):
            return ""
        piece = text[len(self._given) :]
        if piece:
            self._window = self._window[self._given_ids :]
            self._given_ids, self._given = len(self._window), self._text(self._window)
        return piece

    def finish(self) -> str:
        """See TextStream."""
        return self._text(self._window)[len(self._given) :]

    @property
    def at_rest(self) -> bool:
        """See TextStream: what a token adds is never known before the decoder was asked."""
        return False

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode([i for i in ids if i not in self._skipped], skip_special_tokens=False)


def _spaces(text: str, most: int) -> int:
    return min(most, len(text) - len(text.lstrip(" ")))


def _spelling(decoder: dict[str, Any] | None) -> _Spelling | None:
    """The spelling of a decoder as tokenizer.json writes it; None where tokens do not stand for bytes one by one."""
    if decoder is None:
        return None
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps if step["type"] != "Fuse"] == ["ByteLevel"]:
        return _Spelling(_byte_level, "replace")
    replaced: list[tuple[str, str]] = []
    fallback = fused = False
    strip = 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not (fallback or fused):
                replaced.append((old, new))
            case {"type": "ByteFallback"} if not fused:
                fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused and not strip:
                strip = start
            case _:
                return None
    if not fused:
        return None  # texts of tokens are joined by spaces then

    def of(token: str) -> bytes:
        for old, new in replaced:
            token = token.replace(old, new)
        if fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.encode()

    return _Spelling(of, _EACH_BYTE, strip)


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # an added token: it is written as it is
        return token.encode()


def _printable_bytes() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones by their own character of Latin-1, others from U+0100 on, in order."""
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _printable_bytes()
