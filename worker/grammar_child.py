"""``python -m worker.grammar_child``: compiles grammars that nobody trusts, to see that it ends; may be killed for it.

Both ways a frame is its length in 4 bytes, little-endian, and bytes. The first on stdin is a `Names`, and READY answers
it. Then every frame is a grammar, answered by an empty frame once the library has come to its end with it, whatever
that was, until stdin ends or nothing came for IDLE_S. CPU time is limited for each: the last word should its parent not
be there to kill it.
"""

import contextlib
import resource
import select
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

READY = b"ready"
CPU_S = 60
IDLE_S = 30.0
"""Seconds without a grammar after which the process ends. It holds some 25 MB, and starting one takes 0.1 s."""
STACK = 512 << 20
"""Bytes of address space for a thread that compiles. The library follows rules and references by recursion, 3 kB for
each that names the next: the largest grammar that may be sent needs 100 MB, and a stack that ends takes the process
along.
"""


class Names(msgspec.Struct, frozen=True):
    """What of a vocabulary a grammar can name: how many ids there are, and which tokens are special.

    special: id -> bytes. ends: ids.
    """

    size: int
    special: dict[int, bytes]
    ends: list[int]


class _Vocabulary:
    """As llguidance asks of a tokenizer, with bytes in place of the tokens that are text: compiling looks at none."""

    def __init__(self, names: Names) -> None:
        free = [i for i in range(names.size) if i not in names.special]
        tokens = [names.special.get(i, b"") for i in range(names.size)]
        self._ids = {bytes([byte]): i for byte, i in zip(range(256), free, strict=False)}
        for token, i in self._ids.items():
            tokens[i] = token
        self.tokens, self.special_token_ids = tokens, sorted(names.special)
        self.eos_token_id, self.bos_token_id = names.ends[0], None

    def __call__(self, text: bytes | str) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        return [i for byte in data if (i := self._ids.get(bytes([byte]))) is not None]


def limits() -> "LLParserLimits":
    """Of every grammar, here and where it is followed."""
    from llguidance import LLParserLimits  # noqa: PLC0415

    return LLParserLimits(
        initial_lexer_fuel=500_000,  # at 50,000 a ms
        step_lexer_fuel=100_000,  # at 14,000 a ms
        step_max_items=25_000,  # at 20,000 a ms
        max_lexer_states=50_000,  # of 2 kB
        max_grammar_size=250_000,
        verbose_errors=False,
    )


def matcher_of(library: "LLTokenizer", grammar: str) -> "LLMatcher":
    """A grammar, compiled; may be in error. It can take for ever, and needs `STACK`."""
    from llguidance import LLMatcher  # noqa: PLC0415

    return LLMatcher(library, grammar, log_level=0, limits=limits())


def _serve() -> None:
    from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415

    requests, replies = sys.stdin.buffer, sys.stdout.buffer

    def frame() -> bytes | None:
        size = requests.read(4)
        return requests.read(int.from_bytes(size, "little")) if len(size) == 4 else None

    first = frame()
    if first is None:
        return
    names = msgspec.msgpack.decode(first, type=Names)
    library = LLTokenizer(TokenizerWrapper(_Vocabulary(names)), n_vocab=names.size, eos_token=names.ends)
    replies.write(READY)
    replies.flush()
    # Nothing lies in the buffer of stdin here: a grammar is sent only once the one before has its answer.
    while select.select([requests], [], [], IDLE_S)[0] and (grammar := frame()) is not None:
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
        matcher_of(library, grammar.decode())
        replies.write(bytes(4))
        replies.flush()


def main() -> None:
    """See module. Where memory is short the kernel is to end this process, and not the rank that it belongs to."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    threading.stack_size(STACK)
    serving = threading.Thread(target=_serve)
    serving.start()
    serving.join()


if __name__ == "__main__":
    main()
