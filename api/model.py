"""What the API knows of the served checkpoint: its limits, and its tokenizer if it has one."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from api.config import ANY_MODEL, ApiConfig
from api.errors import BadInput, NotFound
from api.reading.calls import format_of
from api.reading.names import ToolFormat
from api.reading.thinking import BEGIN
from api.schemas.base import MAX_SEQUENCES
from api.template_process import TemplateProcess
from worker import conversation
from worker.end_tokens import end_tokens
from worker.tokenizer import Tokenizer

INLINE_CHARS = 4096
"""Texts longer than this, together, are tokenised on a thread, so that the event loop keeps turning."""
INLINE_MESSAGES = 64
"""Conversations of more messages are written on a thread, too."""
MIN_TOKEN_CHARS = 32
"""A token counts for at least so many characters of text: some tokenizers drop spaces before they look for tokens."""
TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True)
class Model:
    """Limits are in tokens. tokenizer None: ids in, ids out only."""

    name: str
    path: Path
    vocab_size: int
    max_model_len: int
    architecture: str
    tokenizer: Tokenizer | None
    ends: tuple[int, ...] = ()
    """What ends a generation, by the checkpoint's own word."""
    template_process: TemplateProcess | None = None
    """Runs chat templates that come with requests; None: they are refused."""
    tool_format: ToolFormat | None = None
    """How the model writes calls of tools; None: they are not read out of its text."""
    reasons: bool = False
    """Reasoning is taken out of its text."""
    always_reasons: bool = False
    """Output begins inside it, whatever the prompt ends with."""
    aliases: tuple[str, ...] = ()
    """Other names of the model, beside its path and SGLang's word for whatever is served."""
    _texts: dict[int, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def load(cls, config: ApiConfig) -> "Model":
        """Read config.json and the tokenizer. Raises ValueError saying what the directory lacks."""
        document: dict[str, Any] = json.loads((config.model / "config.json").read_bytes())
        try:
            tokenizer = Tokenizer.load(config.model)
            ends = tokenizer.ends
        except FileNotFoundError:
            tokenizer, ends = None, end_tokens(config.model, lambda _: None)
        try:
            vocab_size = int(document["vocab_size"])
            context = int(document["max_position_embeddings"])
        except KeyError as error:
            raise ValueError(f"{config.model / 'config.json'} lacks {error}") from None
        limit = config.max_model_len or context
        process = None
        if config.trust_request_chat_template and tokenizer is not None:
            process = TemplateProcess(max_chars=_most_chars(tokenizer, limit))
        template = tokenizer.template(tools=True) if tokenizer is not None else ""
        parser, reasoning = config.tool_call_parser, config.reasoning_parser
        if parser == "auto":
            parser = format_of(template, str(document.get("model_type", "")))
        return cls(
            name=config.model_name,
            path=config.model,
            vocab_size=vocab_size,
            max_model_len=limit,
            architecture=str((document.get("architectures") or ["unknown"])[0]),
            tokenizer=tokenizer,
            ends=tuple(ends),
            template_process=process,
            tool_format=None if parser == "none" else parser,
            reasons=BEGIN in template if reasoning == "auto" else reasoning != "none",
            always_reasons=reasoning == "deepseek_r1",
            aliases=config.model_aliases,
        )

    @property
    def text(self) -> Tokenizer:
        """The tokenizer. Raises BadInput when the checkpoint has none."""
        if self.tokenizer is None:
            raise BadInput("this checkpoint has no tokenizer: send token ids, and expect token ids")
        return self.tokenizer

    @property
    def limit(self) -> str:
        """The context in the words that clients look for."""
        return f"this model's maximum context length is {self.max_model_len} tokens"

    def knows(self, name: str) -> bool:
        """Whether this is a name of the model itself."""
        return name in (self.name, *self.aliases, self.path.name, ANY_MODEL) or name.rstrip("/") == str(self.path)

    def unknown(self, name: str, adapters: Iterable[str]) -> NotFound:
        """The error for a name that is neither the model's nor one of these adapters'."""
        known = (self.name, *self.aliases, str(self.path), *adapters)
        return NotFound(
            f"the model {name[:256]!r} does not exist; served here: {', '.join(map(repr, known))}",
            code="model_not_found",
            param="model",
        )

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises BadInput when it cannot be encoded."""
        return (await self.encode_all([text], add_special_tokens=add_special_tokens))[0]

    async def encode_all(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text. Raises BadInput when one cannot be encoded."""
        tokenizer = self.text
        if len(texts) > MAX_SEQUENCES:
            raise BadInput(f"{len(texts)} prompts are over {MAX_SEQUENCES} sequences; split them")
        for i, text in enumerate(texts):
            self._check_chars(len(text), f"prompt {i}" if len(texts) > 1 else "prompt")

        def encode() -> list[list[int]]:
            return [tokenizer.encode(text, add_special_tokens) for text in texts]

        try:
            return encode() if sum(map(len, texts)) <= INLINE_CHARS else await asyncio.to_thread(encode)
        except UnicodeError as error:
            raise BadInput(
                f"the text is not valid Unicode: {error.reason if hasattr(error, 'reason') else error}"
            ) from None

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, special ones included; parts of characters are U+FFFD. Remembered."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.text.token_bytes(token_id).decode(errors="replace")
        return text

    def whole_text(self, token_id: int) -> str | None:
        """Text of a token that is whole characters, whatever stands around it; None: it is not, or special."""
        return None if self.tokenizer is None else self.tokenizer.whole_text(token_id)

    async def chat_text(self, messages: list[dict[str, Any]], /, **options: Any) -> str:
        """The prompt text of a conversation. Raises BadInput when the template cannot write it."""
        text = self.text
        if len(messages) >= self.max_model_len:
            raise BadInput(
                f"the conversation is too long: {len(messages)} messages, and {self.limit}",
                code=TOO_LONG,
            )
        own = options.get("chat_template")
        if own and not text.has_template(own) and self.template_process is None:
            raise BadInput(
                "chat_template: templates of requests are not run here, for they are programs of whoever sends them; "
                "the operator may allow them (serve --set api.trust_request_chat_template=true)"
            )
        try:
            read = conversation.read(messages)
            chars = sum(len(conversation.text_of(message["content"])) for message in read)
            self._check_chars(chars, "the conversation")
            rendering = text.rendering(read, **options)
            if own and not text.has_template(own) and self.template_process is not None:
                return await self.template_process.text(rendering)
            # Tools and documents, what else is given to the template, and calls of tools, may be long.
            given = sum(map(_length, options.values()))
            simple = all(message.keys() <= {"role", "content"} for message in read)
            if simple and len(read) <= INLINE_MESSAGES and chars + given <= INLINE_CHARS:
                return rendering.text()
            return await asyncio.to_thread(rendering.text)
        except (ValueError, TypeError) as error:
            raise BadInput(f"messages: {error}") from None

    def _check_chars(self, chars: int, what: str) -> None:
        """Raises BadInput for a text that cannot fit whatever its tokens are: to count them would take seconds."""
        most = _most_chars(self.text, self.max_model_len)
        if chars > most:
            raise BadInput(
                f"{what} is too long: {chars} characters, more than {most} cannot fit, and {self.limit}",
                code=TOO_LONG,
            )

    def check_ids(self, ids: list[int], what: str) -> None:
        """Raises BadInput unless every id is in the vocabulary."""
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise BadInput(f"{what}: token id {wrong} is not in the vocabulary [0, {self.vocab_size})")

    def check_prompt(self, ids: list[int], what: str = "prompt", *, whole: bool = False) -> None:
        """Raises BadInput unless the model can continue this prompt by at least one token; whole: can read it."""
        if not ids:
            raise BadInput(f"{what} is empty: send at least one token")
        if len(ids) >= self.max_model_len + whole:
            why = "" if whole else " leave no room for output"
            raise BadInput(f"{what} is too long: {len(ids)} tokens{why}, and {self.limit}", code=TOO_LONG)
        self.check_ids(ids, what)


def _length(value: Any) -> float:
    """Characters that a template may write for a value; of a list or an object nobody counts them."""
    if isinstance(value, str):
        return len(value)
    return float("inf") if value and isinstance(value, list | dict) else 0


def _most_chars(tokenizer: Tokenizer, tokens: int) -> int:
    """No text of more characters is so few tokens."""
    return max(tokenizer.longest_token, MIN_TOKEN_CHARS) * tokens
