"""Which version computed what a token was sampled from: told position by position, and as forward passes."""

import pytest

from rollout_client.http_calls import Output
from rollout_client.spans import ForwardPass, Span, computed_by, forward_passes

PROMPT = 3
SPANS = [Span(4, 0, 2), Span(5, 2, 4), Span(5, 4, 5, recomputed=True), Span(6, 5, 6)]


def one(start: int, end: int, versions: list[int]) -> ForwardPass:
    """A pass without an adapter, over versions whose spans say no digest."""
    return ForwardPass(start, end, versions, digests=[""] * len(versions))


def test_one_version_made_it_all():
    assert forward_passes([Span(4, 0, 2)], PROMPT) == [one(0, 2, [4, 4, 4, 4])]


def test_a_cache_that_was_kept_stays_with_who_made_it_until_all_of_it_is_computed_again():
    # Positions: the prompt, whose last makes token 0, then tokens 0 to 4; the last token is not fed.
    assert forward_passes(SPANS, PROMPT) == [
        one(0, 4, [4, 4, 4, 4, 5, 5]),
        one(4, 6, [5, 5, 5, 5, 5, 5, 5, 6]),
    ]


def test_a_number_that_stood_for_two_is_told_apart_by_its_digest():
    spans = [
        Span(7, 0, 1, digest="aa", adapter_version=2, adapter_digest="a2"),
        Span(7, 1, 3, digest="bb", adapter_version=2, adapter_digest="b2"),
    ]
    assert forward_passes(spans, PROMPT) == [
        ForwardPass(0, 3, [7] * 5, [2] * 5, ["aa", "aa", "aa", "bb", "bb"], ["a2", "a2", "a2", "b2", "b2"])
    ]


@pytest.mark.parametrize("prompt", [1, 2, 7])
@pytest.mark.parametrize("spans", [SPANS, SPANS[:2], [Span(9, 0, 1), Span(10, 1, 3, recomputed=True)]])
def test_a_history_told_token_by_token(prompt, spans):
    """As a worker lives it: a cache that grows by what each token is sampled from, or begins anew."""
    cache: list[int] = []
    for span in spans:
        if span.recomputed:
            cache = [span.version] * len(cache)
        for token in range(span.start, span.end):
            cache += [span.version] * (prompt + token - len(cache))
            assert [computed_by(spans, prompt, position=p, token=token) for p in range(len(cache))] == cache
            (one,) = (one for one in forward_passes(spans, prompt) if one.start <= token < one.end)
            assert one.versions[: prompt + token] == cache


def test_what_was_not_sampled_has_no_answer():
    output = Output(0, 0, [1] * 6, [-1.0] * 6, SPANS)
    assert output.computed_by(PROMPT, position=4, token=3) == 5
    assert output.computed_by(PROMPT, position=3, token=4) == 5
    assert output.computed_by(PROMPT, position=3, token=3) == 4
    assert output.forward_passes(PROMPT) == forward_passes(SPANS, PROMPT)
    for position, token in ((6, 3), (-1, 0), (0, 6), (0, -1)):
        with pytest.raises(IndexError, match="was not sampled from"):
            output.computed_by(PROMPT, position=position, token=token)


def test_an_empty_output_needs_no_pass():
    assert forward_passes([Span(4, 0, 0)], PROMPT) == []


def test_spans_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="adjoin"):
        forward_passes([Span(4, 0, 2), Span(5, 3, 4)], PROMPT)
    with pytest.raises(ValueError, match="at least one"):
        forward_passes([Span(4, 0, 2)], 0)
