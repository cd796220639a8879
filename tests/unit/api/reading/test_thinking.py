"""Reasoning is split from the answer, whole and in pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.reading.thinking import Thinking, opened_by

CASES = [
    (False, "<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
    (False, "\n<think>hm</think>Yes. ", "hm", "Yes. "),
    (False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    (False, " Yes <think>no</think>", "", " Yes <think>no</think>"),
    (False, "<think>a < b\n\n  c", "a < b\n\n  c", ""),
    (False, "<thi", "", "<thi"),
    (False, "", "", ""),
    (True, "hm\n</think>\nYes.\n", "hm", "Yes.\n"),
    (True, "\nhm </thi", "hm </thi", ""),
    (True, "</think>Yes", "", "Yes"),
]


def read(opened: bool, pieces: list[str]) -> tuple[str, str]:
    thinking = Thinking(opened=opened)
    found = [*map(thinking.push, pieces), thinking.finish()]
    return "".join(f.reasoning for f in found), "".join(f.answer for f in found)


@pytest.mark.parametrize(("opened", "text", "reasoning", "answer"), CASES)
def test_in_every_two_pieces_and_in_characters(opened: bool, text: str, reasoning: str, answer: str) -> None:
    assert read(opened, list(text)) == (reasoning, answer)
    for cut in range(len(text) + 1):
        assert read(opened, [text[:cut], text[cut:]]) == (reasoning, answer), cut


@given(st.booleans(), st.lists(st.sampled_from(["<think>", "</think>", " ", "\n", "x", "<", "</"]), max_size=20))
def test_any_text_in_any_pieces(opened: bool, words: list[str]) -> None:
    assert read(opened, words) == read(opened, ["".join(words)])


def test_the_prompt_says_whether_output_begins_inside() -> None:
    assert opened_by("<|im_start|>assistant\n<think>\n", continued=False)
    assert not opened_by("assistant\n<think>\n\n</think>\n\n", continued=False)
    assert not opened_by("what is <think>?\nassistant\n", continued=False)
    assert opened_by("assistant\n<think>\nI was", continued=True)
    assert not opened_by("assistant\n<think>\nhm</think>So", continued=True)
