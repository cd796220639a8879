"""Output constrained by a grammar: compiled on threads beside the loop, then followed by each sequence token by token.

A grammar is what llguidance reads: JSON that holds Lark grammars, JSON schemas and regular expressions. The API writes
it. Bounds on its size and on the work of a step keep what a request sends from standing in the way of others: it is
compiled in a process first, which is killed where that has no end (grammar_trial.py), the library lets go of Python's
lock while it compiles, what a mask may take is counted in processor time, and a grammar over a bound ends its own
requests and nothing else.
"""

import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from worker.engine.base import Float32
from worker.grammar_child import STACK, Names, matcher_of
from worker.grammar_trial import Trial
from worker.tokenizer import Tokenizer

if TYPE_CHECKING:  # 0.1 s, and only who sends a grammar needs it
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

_Ids = npt.NDArray[np.int64]
FILL = np.float32(-1e30)
"""A masked logit, where a row has to stay finite."""
_KEPT = 64
"""How many compiled grammars are remembered: a step of RL sends the same one thousands of times."""
_THREADS = 2
_POOLS = 3
"""Of so many threads each. While all threads of one have a grammar that is late, those of the next take over."""
_TRIAL_S = 20.0
"""Seconds of the processor for compiling a grammar in a process that can be killed. What is over by then takes as long
again here.
"""
_TRIED_WITHIN_S = 40.0
"""Seconds in which it has to get them; else nothing is known of the grammar, and it is tried anew when it comes."""
_COMPILE_S = 45.0
"""Seconds from a grammar's arrival to its being compiled; beyond them its requests are refused."""
_NO_END = "ff_tokens"
"""Where the library gave up looking ahead, as it does for as long as one text only can follow."""
_MASK_S = 0.1
_MASK_S_PER_TOKEN = 0.002
"""Processor seconds that the masks of a request may take: _MASK_S, and this much more for each token. Usual masks take
0.00001.
"""


class Budget:
    """Processor seconds that a request has left for its masks, all its sequences together."""

    def __init__(self) -> None:
        self.left_s = _MASK_S


class Matcher:
    """Where in its grammar the output of one sequence is. ends: ids that end the sequence; they may follow where the
    grammar may end.
    """

    def __init__(
        self, matcher: "LLMatcher", vocab_size: int, reserved: _Ids, ends: frozenset[int], budget: Budget
    ) -> None:
        self._matcher = matcher
        self._budget = budget
        self._vocab = vocab_size
        self._reserved = reserved  # what llguidance takes for ends
        self._ends = ends
        self._end_ids: _Ids = np.array(sorted(ends), np.int64)
        self._bits = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self._known = False  # the mask of what comes next

    @property
    def complete(self) -> bool:
        """Whether the output is complete: the grammar lets nothing follow, and the sequence has no end token to
        say so.
        """
        return not self._ends and self._matcher.is_stopped() and not self._matcher.is_error()

    def record(self, token: int) -> None:
        """Take a token that is part of the output now."""
        if token not in self._ends:
            self._matcher.consume_token(token)
        self._budget.left_s += _MASK_S_PER_TOKEN
        self._known = False

    def restrict(self, row: Float32, out: Float32, fill: np.float32) -> str:
        """Write logits [vocab] to `out`, `fill` where the grammar does not go on. Returns why none could follow, or "".

        row and out may be the same array.
        """
        bits = self.bits()
        if isinstance(bits, str):
            return bits
        allowed = np.unpackbits(bits.view(np.uint8), count=self._vocab, bitorder="little").view(np.bool_)
        count = int(np.count_nonzero(allowed))
        if count * 8 < self._vocab:
            ids = np.flatnonzero(allowed)
            kept = row[ids]
            out.fill(fill)
            out[ids] = kept
        else:
            if out is not row:
                out[:] = row
            out[np.flatnonzero(~allowed)] = fill
        return ""

    def bits(self) -> npt.NDArray[np.int32] | str:
        """Ids that may follow, as int32 [ceil(vocab / 32)] of bits, the lowest id first; or why none can. Kept until
        `record`.
        """
        problem = "" if self._known else self._compute()
        return problem or self._bits[0]

    def _compute(self) -> str:
        from llguidance.numpy import fill_next_token_bitmask  # noqa: PLC0415

        began = time.thread_time()
        fill_next_token_bitmask(self._matcher, self._bits, 0)
        self._budget.left_s -= time.thread_time() - began
        if self._matcher.is_error():
            error = self._matcher.get_error()
            if _NO_END in error:
                return "the grammar cannot be followed: from here on there is one text only, and it has no end"
            return f"the grammar cannot be followed: {_first_line(error)}"
        if self._budget.left_s < 0:
            return "the grammar takes too much time to follow: make it simpler, or bound its repetitions"
        bits = self._bits.view(np.uint8)[0]
        bits[self._reserved >> 3] &= ~(1 << (self._reserved & 7)).astype(np.uint8)
        if self._matcher.is_accepting():
            np.bitwise_or.at(bits, self._end_ids >> 3, (1 << (self._end_ids & 7)).astype(np.uint8))
        self._known = True
        return ""


class Compiled:
    """A grammar that sequences can follow. Each sequence has a matcher of its own, those of one request share a
    budget.
    """

    def __init__(self, matcher: "LLMatcher", vocab_size: int, reserved: _Ids) -> None:
        self._matcher = matcher
        self._vocab = vocab_size
        self._reserved = reserved
        self._budget = Budget()

    def of_request(self) -> "Compiled":
        """The same grammar for another request, which has a budget of its own."""
        return Compiled(self._matcher, self._vocab, self._reserved)

    def matcher(self, ends: frozenset[int]) -> Matcher:
        """A matcher at the beginning of the output. ends: ids that end this sequence."""
        return Matcher(self._matcher.deep_copy(), self._vocab, self._reserved, ends, self._budget)


class Refused(NamedTuple):
    """The answer for a grammar that cannot be followed. why: in words for the client."""

    why: str


class _Begun(NamedTuple):
    """A grammar that is being compiled, or has been. since: when it was sent, monotonic seconds. pool: whose threads
    compile it.
    """

    future: "Future[Compiled | Refused]"
    since: float
    pool: ThreadPoolExecutor

    @property
    def late(self) -> bool:
        """Whether compiling takes too long: requests with this grammar are refused."""
        return not self.future.done() and time.monotonic() - self.since > _COMPILE_S


class Grammars:
    """Compiles what requests constrain their output to. One owner thread; the work is done on others.

    tokenizer: None = there is no text, and every grammar is refused. ends: the checkpoint's. counters: grammars begun,
    and requests refused.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, ends: tuple[int, ...]) -> None:
        self.counters = {"grammars": 0.0, "grammars_refused": 0.0}
        self._tokenizer = tokenizer
        self._vocab = vocab_size
        # Without an end the library still wants an id for one; it is never open then.
        self._reserved = sorted({i for i in ends if 0 <= i < vocab_size}) or [vocab_size - 1]
        self._library: LLTokenizer | None = None
        self._of_thread = threading.local()
        self._trials: list[Trial] = []
        self._pools: list[ThreadPoolExecutor] = []
        self._found: OrderedDict[str, _Begun] = OrderedDict()

    def look_up(self, grammar: str) -> Compiled | Refused | None:
        """The compiled grammar, or why there is none; None: it is being compiled, ask again. Begins that if need be."""
        found = self._look_up(grammar)
        self.counters["grammars_refused"] += isinstance(found, Refused)
        return found

    def _look_up(self, grammar: str) -> Compiled | Refused | None:
        if self._tokenizer is None:
            return Refused("output can only be constrained with a tokenizer, and this checkpoint has none")
        if grammar not in self._found:
            pool = self._free_pool()
            if pool is None:
                return Refused("too many grammars that were sent before are still being compiled: try again later")
            self.counters["grammars"] += 1
            try:
                self._found[grammar] = self._begin(grammar, pool)
            except RuntimeError as error:  # a limit of processes, or of address space
                return Refused(f"there is no thread to compile the grammar on: {error}")
            self._forget()
        self._found.move_to_end(grammar)
        begun = self._found[grammar]
        if begun.future.done():
            return self._outcome(grammar, begun.future)
        if begun.late:
            if begun.future.cancel():  # it has not begun, and nobody waits for it
                del self._found[grammar]
            return Refused(f"the grammar was not compiled within {_COMPILE_S:g} s: make it simpler")
        return None

    def _outcome(self, grammar: str, future: "Future[Compiled | Refused]") -> Compiled | Refused:
        """What became of a grammar. An error of the library's, a panic too, is the answer to its request: raised here
        it would end the loop, and where that request went next another one.
        """
        error = future.exception()
        if error is None:
            return future.result()
        log.error("a grammar could not be compiled", exc_info=error)
        del self._found[grammar]  # it may have been memory that was short
        return Refused(f"the grammar could not be compiled: {_first_line(f'{type(error).__name__}: {error}')}")

    def _free_pool(self) -> ThreadPoolExecutor | None:
        """The first pool with a thread for another grammar; one more is made while there are fewer than _POOLS. None:
        all threads are at grammars that are late.
        """
        late = [begun.pool for begun in self._found.values() if begun.late and begun.future.running()]
        for pool in self._pools:
            if late.count(pool) < _THREADS:
                return pool
        if len(self._pools) == _POOLS:
            return None
        self._pools.append(ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar"))
        return self._pools[-1]

    def _begin(self, grammar: str, pool: ThreadPoolExecutor) -> _Begun:
        usual = threading.stack_size(STACK)  # `submit` may start a thread
        try:
            return _Begun(pool.submit(self._compile, grammar), time.monotonic(), pool)
        finally:
            threading.stack_size(usual)

    def close(self) -> None:
        """Drop grammars that wait to be compiled, and end the processes that they are tried in."""
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for trial in self._trials:
            trial.close()

    def _forget(self) -> None:
        done = [grammar for grammar, begun in self._found.items() if begun.future.done()]
        for grammar in done[: max(0, len(self._found) - _KEPT)]:
            del self._found[grammar]

    def _compile(self, grammar: str) -> Compiled | Refused:
        if not self._trial().ends(grammar, _TRIAL_S, _TRIED_WITHIN_S):
            return Refused(f"the grammar was not compiled within {_TRIAL_S:g} s: make it simpler")
        matcher = matcher_of(self._of_library(), grammar)
        if matcher.is_error():
            return Refused(f"the grammar is not valid: {_first_line(matcher.get_error())}")
        reserved = np.array(self._reserved, np.int64)
        compiled = Compiled(matcher, self._vocab, reserved)
        # The first mask is the dearest, and says whether anything can be written at all.
        first = compiled.matcher(frozenset(self._reserved))
        row = np.zeros(self._vocab, np.float32)
        if problem := first.restrict(row, row, FILL):
            return Refused(problem)
        return compiled if row.max() == 0 else Refused("the grammar cannot be followed: no token begins it")

    def _trial(self) -> Trial:
        """The process of this thread, in which grammars are compiled first."""
        trial: Trial | None = getattr(self._of_thread, "trial", None)
        if trial is None:
            assert self._tokenizer is not None
            special = {i: self._tokenizer.token_bytes(i) for i in self._tokenizer.special_ids if i < self._vocab}
            trial = self._of_thread.trial = Trial(Names(self._vocab, special, self._reserved))
            self._trials.append(trial)
        return trial

    def _of_library(self) -> "LLTokenizer":
        """The vocabulary as llguidance wants it, made on first use. Two threads that come at the same time both make
        it.
        """
        if self._library is None:
            from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415

            assert self._tokenizer is not None
            began = time.monotonic()
            wrapper = TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab, self._reserved[0]))
            self._library = LLTokenizer(wrapper, n_vocab=self._vocab, eos_token=self._reserved)
            log.info("the vocabulary is ready for grammars after %.1f s", time.monotonic() - began)
        return self._library


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end: int) -> None:
        self.eos_token_id = end
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < vocab_size)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(), add_special_tokens=False)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:500]
