"""Text <-> token ids of one checkpoint: the ids the Hugging Face stack gives, from `tokenizers` and jinja2 alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from weight_manager.checkpoint import POINTER, is_pointer
from worker import conversation
from worker.chat_template import Rendering
from worker.detokenizer import Detokenizer, TextStream
from worker.end_tokens import end_tokens, spelling
from worker.json_files import read_object

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_SHORT = 1024
"""Most characters of a text that is encoded by itself. Longer ones are encoded as batches of one: only for batches the
library lets other threads run.
"""


class Tokenizer:
    """Text of one checkpoint. ends: what ends a generation by the checkpoint's own word, and where it says so."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        special: Mapping[str, str],
        templates: Mapping[str, str],
        ends: Mapping[int, list[str]],
    ) -> None:
        self.ends = dict(ends)
        self.vocab_size: int = tokenizer.get_vocab_size()
        self.longest_token: int = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
        """Characters, as the vocabulary spells it: no fewer than those of text that it stands for."""
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._special = dict(special)
        self._templates = dict(templates)

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """Read tokenizer.json and what lies beside it. Raises FileNotFoundError, ValueError."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path} {POINTER}" if is_pointer(path) else f"{path}: {error}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        config = read_object(model_dir / "tokenizer_config.json")
        special = _special_tokens({**read_object(model_dir / "special_tokens_map.json"), **config})
        _set_bos_and_eos(tokenizer, config, special)
        ends = end_tokens(model_dir, tokenizer.token_to_id)
        return cls(tokenizer, special, _templates(model_dir, config), ends)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises UnicodeError for lone surrogates."""
        text.encode()  # the library would panic
        if len(text) <= _SHORT:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids = encoded.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids. Ids the tokenizer does not know have no text."""
        return self._detokenizer.decode(ids, skip_special=skip_special)

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it, or None."""
        return self._tokenizer.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token by itself stands for, special ones included: a part of a character, maybe."""
        return self._detokenizer.token_bytes(token_id)

    def whole_text(self, token_id: int) -> str | None:
        """Text of a token that is whole characters, whatever stands around it; None: it is not, or special."""
        return self._detokenizer.whole_text(token_id)

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are not text: no text is encoded to them, and they are left out of text where that is wanted."""
        return self._detokenizer.special_ids

    def special_id(self, text: str) -> int | None:
        """The special token that is spelled so."""
        found = self._tokenizer.token_to_id(text)
        return found if found in self.special_ids else None

    def stream(self, skip_special: bool = True, kept: frozenset[str] = frozenset()) -> TextStream:
        """A decoder fed one token at a time; its pieces and its end join to `decode` of all of them.

        kept: special tokens that are not skipped.
        """
        return self._detokenizer.stream(skip_special=skip_special, kept=kept)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        **options: Any,
    ) -> str:
        """The prompt text of a conversation; encode it with add_special_tokens=False. options, errors: of `rendering`.

        Raises ValueError also when the template refuses the messages.
        """
        return self.rendering(conversation.read(messages), **options).text()

    def has_template(self, name: str) -> bool:
        """Whether the checkpoint has a chat template of this name."""
        return name in self._templates

    def template(self, *, tools: bool) -> str:
        """The checkpoint's own template of conversations, with tools or without; "" when it has none."""
        return self._templates.get("tool_use" if tools else "default") or self._templates.get("default", "")

    def rendering(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> Rendering:
        """How a conversation (`conversation.read`) becomes a prompt.

        chat_template: the template itself, or the name of one the checkpoint has. variables: seen by the template.
        Raises ValueError when there is no template.
        """
        name = chat_template or ("tool_use" if tools and "tool_use" in self._templates else "default")
        template = self._templates.get(name, chat_template)
        if template is None:
            raise ValueError("the checkpoint has no chat template: send one, or send token ids or plain text")
        values = {
            **self._special,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            **variables,
        }
        return Rendering(template, messages, values, continue_final_message)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens; written as strings, or as objects with a content."""
    found: dict[str, str] = {}
    for name in _SPECIAL:
        content = spelling(config, name)
        if content is not None:
            found[name] = content
    return found


def _set_bos_and_eos(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """tokenizer.json says what encoding adds, unless the config states add_bos_token or add_eos_token."""
    if "add_bos_token" not in config and "add_eos_token" not in config and tokenizer.post_processor is not None:
        return
    added = {}
    for name in ("bos", "eos"):
        token = special.get(f"{name}_token")
        known = None if token is None else tokenizer.token_to_id(token)
        if config.get(f"add_{name}_token") and known is not None:
            added[name] = (token, known)
    single = [*([added["bos"][0]] if "bos" in added else []), "$A", *([added["eos"][0]] if "eos" in added else [])]
    tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=list(added.values()))


def _templates(model_dir: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; files win over tokenizer_config.json, as newer checkpoints have it."""
    stated = config.get("chat_template")
    found: dict[str, str] = {}
    if isinstance(stated, str):
        found["default"] = stated
    elif isinstance(stated, list):
        found.update({entry["name"]: entry["template"] for entry in stated})
    for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text()
    single = model_dir / "chat_template.jinja"
    if single.is_file():
        found["default"] = single.read_text()
    return found
