"""A tokenizer of 32 tokens that a test can read: letters, what JSON is made of, and two ends."""

import tokenizers
from tokenizers import decoders, models

from worker.tokenizer import Tokenizer

LETTERS = 'abcdef0123456789{}[]":,-. xyz'
END, OTHER_END = 29, 30
VOCAB = 32
"""31 has no text."""


def letters() -> Tokenizer:
    vocab = {letter.replace(" ", "Ġ"): i for i, letter in enumerate(LETTERS)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>", "<other>"])
    assert made.token_to_id("<end>") == END
    return Tokenizer(made, {}, {}, {END: ["test"]})


def ids(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def text(tokens: list[int]) -> str:
    return "".join(LETTERS[token] if token < len(LETTERS) else f"<{token}>" for token in tokens)
