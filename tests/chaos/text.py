"""Text for the random models of chaos runs, so that output can be held to patterns: a character for each token."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.reference.checkpoint import CONFIG

END = "<end>"
_SPACE = "\u0120"
_ALPHABET = [END, _SPACE, *sorted({*pre_tokenizers.ByteLevel.alphabet()} - {_SPACE})][: CONFIG["vocab_size"]]
"""Ids to how the byte-level alphabet spells them: printable ASCII is there as itself."""


def write_tokenizer(model: Path) -> None:
    """tokenizer.json, for a checkpoint of the reference's vocabulary."""
    tokenizer = tokenizers.Tokenizer(models.BPE({spelt: i for i, spelt in enumerate(_ALPHABET)}, []))
    tokenizer.add_special_tokens([END])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(model / "tokenizer.json"))


def text_of(tokens: Sequence[int]) -> str:
    """What they spell."""
    return "".join(_ALPHABET[token] for token in tokens).replace(_SPACE, " ")
