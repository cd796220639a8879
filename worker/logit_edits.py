"""What a request does to its logits before the temperature: its grammar, masks, bias, penalties, in that order."""

import numpy as np
import numpy.typing as npt

from worker.engine.base import Float32
from worker.grammar import Matcher
from worker.messages import SamplingParams

IN_PROMPT, CLOSED, TIMES = 1 << 31, 1 << 30, (1 << 30) - 1
"""Of the word that says of an id what `LogitEdits.words` knows: it is in the prompt (told where a repetition penalty
is), it is never drawn, how often it has come out (told where there is a penalty).
"""

_Ids = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint32]
_MOST = 1e30
"""Bias beyond this would overflow float32 and read as broken weights."""


class LogitEdits:
    """The edits of a sequence's logits. stop_ids: masked until min_tokens are out. grammar: where the output is in it.

    Every edit touches few ids, never the row twice.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_ids: list[int],
        stop_ids: frozenset[int],
        grammar: Matcher | None = None,
    ) -> None:
        self.grammar = grammar
        self._sampling = sampling
        self._length = 0
        self._stop_ids: _Ids = np.array(sorted(stop_ids), np.int64)
        biased = sorted(sampling.logit_bias.items())
        self._bias_ids: _Ids = np.array([i for i, _ in biased], np.int64)
        self._bias: Float32 = np.clip([bias for _, bias in biased], -_MOST, _MOST).astype(np.float32)
        allowed = sampling.allowed_token_ids
        self._allowed: _Ids | None = None if allowed is None else np.unique(np.array(allowed, np.int64))
        self._banned: _Ids = np.unique(np.array([word[0] for word in sampling.bad_words if len(word) == 1], np.int64))
        self._bad_words = [word for word in sampling.bad_words if len(word) > 1]
        self._kept = max(map(len, self._bad_words), default=1) - 1
        self._last: list[int] = []  # output ids, as many as begin the longest of them
        self._output: list[int] = []  # ids, while they are counted
        self._counts: dict[int, int] | None = None
        if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0:
            self._counts = {}
        self._prompt = frozenset(prompt_ids) if sampling.repetition_penalty != 1.0 else frozenset()
        self._seen = sorted(self._prompt)  # prompt ids, then output ids that are not among them
        self._fixed = bool(sampling.logit_bias or sampling.bad_words or allowed is not None or self._counts is not None)

    @property
    def active(self) -> bool:
        """Whether `apply` would change anything now; if not, it never will again."""
        return self.grammar is not None or self._edits

    @property
    def grammar_alone(self) -> Matcher | None:
        """The grammar, if nothing else would change anything now."""
        return None if self._edits else self.grammar

    def record(self, token: int) -> None:
        """This token is part of the output now."""
        self._length += 1
        if self.grammar is not None:
            self.grammar.record(token)
        if self._kept:
            self._last = [*self._last, token][-self._kept :]
        if self._counts is not None:
            if token not in self._counts and token not in self._prompt:
                self._seen.append(token)
            self._counts[token] = self._counts.get(token, 0) + 1
            self._output.append(token)

    def pass_over(self, tokens: int) -> None:
        """So many more are part of the output, while nothing was active: which they are is no matter."""
        assert self.grammar is None, "a grammar depends on the tokens before"
        assert not self._fixed, "these edits depend on the tokens before"
        self._length += tokens

    def apply(self, row: Float32) -> str:
        """Change logits [vocab] in place. Masked ids become -inf. Returns why no token can follow, or ""."""
        if self.grammar is not None and (problem := self.grammar.restrict(row, row, np.float32(-np.inf))):
            return problem
        if self._allowed is not None:
            kept = row[self._allowed]
            row[:] = -np.inf
            row[self._allowed] = kept
        if self._masking:
            row[self._stop_ids] = -np.inf
        row[self._banned] = -np.inf
        for word in self._bad_words:
            if self._last[1 - len(word) :] == word[:-1]:
                row[word[-1]] = -np.inf
        if self._bias.size:
            row[self._bias_ids] += self._bias
        if self._counts is not None:
            self._penalize(row, self._counts)
        return ""

    # The same in pieces, for whoever edits elsewhere: `grammar.bits()`, then `addends`, then `words` and `penalties`.

    @property
    def length(self) -> int:
        """Output tokens so far."""
        return self._length

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Repetition, presence, frequency."""
        sampling = self._sampling
        return sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty

    @property
    def worded(self) -> bool:
        """Whether any id has a word other than 0."""
        return self._counts is not None or self._allowed is not None or self._banned.size > 0

    @property
    def usual_word(self) -> int:
        """That of all ids that `words` does not name."""
        return 0 if self._allowed is None else CLOSED

    def words(self) -> tuple[_Ids, _Words]:
        """Rising ids and their words [N], of all that do not have the usual one."""
        counts, none = self._counts or {}, np.zeros(0, np.int64)
        prompt, out = np.array(sorted(self._prompt), np.int64), np.array(list(counts), np.int64)
        allowed = none if self._allowed is None else self._allowed
        ids = np.unique(np.concatenate((prompt, out, self._banned, allowed)))
        words: _Words = np.full(len(ids), self.usual_word, np.uint32)
        words[np.searchsorted(ids, allowed)] = 0
        words[np.searchsorted(ids, self._banned)] = CLOSED
        words[np.searchsorted(ids, prompt)] |= np.uint32(IN_PROMPT)
        words[np.searchsorted(ids, out)] |= np.array(list(counts.values()), np.uint32)
        return ids, words

    def changed(self, since: int) -> tuple[list[int], list[int]]:
        """Ids that have come out since so many tokens were, and their words."""
        ids = list(dict.fromkeys(self._output[since:]))
        return ids, [self._word(i) for i in ids]

    def _word(self, token: int) -> int:
        assert self._counts is not None, "only what is counted comes out"
        closed = _has(self._banned, token) or (self._allowed is not None and not _has(self._allowed, token))
        return self._counts[token] | IN_PROMPT * (token in self._prompt) | CLOSED * closed

    def addends(self) -> tuple[_Ids, Float32]:
        """Rising ids, some with a bias and then masked, and what is added to their logits now [N]: -inf masks."""
        masked = [word[-1] for word in self._bad_words if self._last[1 - len(word) :] == word[:-1]]
        if self._masking:
            masked += self._stop_ids.tolist()
        if not masked:
            return self._bias_ids, self._bias
        masked = list(dict.fromkeys(masked))
        ids = np.concatenate((self._bias_ids, np.array(masked, np.int64)))
        values = np.concatenate((self._bias, np.full(len(masked), -np.inf, np.float32)))
        order = np.argsort(ids)
        return ids[order], values[order]

    @property
    def _edits(self) -> bool:
        return self._fixed or self._masking

    @property
    def _masking(self) -> bool:
        return self._length < self._sampling.min_tokens and self._stop_ids.size > 0

    def _penalize(self, row: Float32, counts: dict[int, int]) -> None:
        sampling = self._sampling
        if sampling.repetition_penalty != 1.0:
            seen: _Ids = np.array(self._seen, np.int64)
            logits = row[seen]
            penalty = np.float32(sampling.repetition_penalty)
            row[seen] = np.where(logits > 0, logits / penalty, logits * penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            out: _Ids = np.fromiter(counts, np.int64, len(counts))
            times = np.fromiter(counts.values(), np.float32, len(counts))
            row[out] -= np.float32(sampling.presence_penalty) + np.float32(sampling.frequency_penalty) * times


def _has(rising: _Ids, token: int) -> bool:
    at = int(np.searchsorted(rising, token)) if rising.size else 0
    return at < rising.size and bool(rising[at] == token)
