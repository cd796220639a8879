"""Where a sequence ends."""

import pytest

from worker.messages import SamplingParams
from worker.sequence import StopCheck, StopRules


class _Letters:
    """Tokens are pieces of text; None stands for a character that is not finished yet."""

    def __init__(self, *pieces: str) -> None:
        self._pieces = pieces

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]


def _ending(pieces: list[str], limit: int = 99, **fields: object) -> tuple[int, object, object] | None:
    """(tokens, reason, stop reason) after feeding piece after piece."""
    rules = StopRules(SamplingParams(**fields), (77,), limit)  # type: ignore[arg-type]
    check = StopCheck(rules, _Letters(*pieces))
    for length in range(1, len(pieces) + 1):
        if ending := check.after(length - 1, length):
            return length, *ending
    return None


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["He", "llo", " wor", "ld"], ["o w"], (3, "stop", "o w")),
        (["a", "b", "c", "d"], ["abcd"], (4, "stop", "abcd")),
        (["xxEN", "D and more"], ["END"], (2, "stop", "END")),
        (["E", "", "", "ND"], ["END"], (4, "stop", "END")),
        (["one END two"], ["two", "END"], (1, "stop", "END")),  # the first in the text
        (["E", "N", "E", "ND"], ["END"], (4, "stop", "END")),
        (["E", "N", "X"], ["END"], None),
        (["\n", "\n"], ["\n\n", ""], (2, "stop", "\n\n")),
        (["x"], ["x"], (1, "stop", "x")),
        (["é", "中", "🙂"], ["中🙂"], (3, "stop", "中🙂")),
    ],
)
def test_stop_strings_cross_token_boundaries(
    pieces: list[str], stop: list[str], expected: tuple[int, str, str] | None
) -> None:
    assert _ending(pieces, stop=stop) == expected


def test_min_tokens_lets_early_matches_pass_for_good() -> None:
    assert _ending(["END", " ", "END"], stop=["END"], min_tokens=2) == (3, "stop", "END")
    assert _ending(["EN", "D", "x", "y"], stop=["END"], min_tokens=3) is None
    assert _ending(["END", "x", "y"], stop=["END", "a much longer one"], min_tokens=2) is None


def test_ids_before_eos_before_strings_before_length() -> None:
    pieces = [""] * 77 + ["END"]
    rules = StopRules(SamplingParams(stop=["END"], stop_token_ids=[77]), (77,), 1)
    assert StopCheck(rules, _Letters(*pieces)).after(77, 1) == ("stop", 77)
    rules = StopRules(SamplingParams(stop=["END"]), (77,), 1)
    assert StopCheck(rules, _Letters(*pieces)).after(77, 1) == ("stop", None)
    rules = StopRules(SamplingParams(stop=["END"], ignore_eos=True), (77,), 1)
    assert StopCheck(rules, _Letters(*pieces)).after(77, 1) == ("stop", "END")
    rules = StopRules(SamplingParams(ignore_eos=True), (77,), 1)
    assert StopCheck(rules, None).after(77, 1) == ("length", None)


def test_stop_ids_wait_for_min_tokens() -> None:
    check = StopCheck(StopRules(SamplingParams(stop_token_ids=[5], min_tokens=2), (), 9), None)
    assert check.after(5, 1) is None
    assert check.after(5, 2) == ("stop", 5)
