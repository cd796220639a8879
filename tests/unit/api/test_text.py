import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.text import StreamedText, TextOptions, final_text
from worker.messages import Chunk, Span


class Bytes:
    """A tokenizer: ids below 256 are bytes of UTF-8, others special."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def stream(self, skip_special: bool = True) -> "Bytes":
        made = Bytes()
        made.ids, made.given = [], ""
        return made

    def push(self, token_id: int) -> str:
        self.ids.append(token_id)
        text = self.decode(self.ids)
        if text.endswith("\ufffd"):
            return ""
        piece, self.given = text[len(self.given) :], text
        return piece


def ends(ids: list[int], stops: list[str], min_tokens: int) -> tuple[list[int], str | None]:
    """As the worker ends a sequence: at the first token that completes a stop string, from min_tokens on."""
    tokenizer = Bytes()
    seen = ""
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:n])
        if text.endswith("\ufffd"):
            continue
        found = [(at, stop) for stop in stops if (at := text.find(stop, max(0, len(seen) - len(stop) + 1))) >= 0]
        seen = text
        if found and n >= min_tokens:
            return ids[:n], min(found)[1]
    return ids, None


@given(
    text=st.text(alphabet="abé日🎉", max_size=14),
    stops=st.lists(st.text(alphabet="abé日", min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 12),
    cuts=st.lists(st.integers(1, 5), max_size=20),
    include=st.booleans(),
)
def test_streamed_pieces_join_to_the_final_text_wherever_chunks_are_cut(text, stops, min_tokens, cuts, include):
    ids, matched = ends(list(text.encode()), stops, min_tokens)
    finish = "stop" if matched else "length"
    options = TextOptions(include_stop=include, stop=tuple(stops))
    whole = final_text(Bytes(), ids, finish, matched, options)
    streamed, pieces, rest = StreamedText(Bytes(), options), [], list(ids)
    for size in cuts:
        part, rest = rest[:size], rest[size:]
        if rest:
            pieces.append(streamed.push(Chunk("r", 0, part, [0.0] * len(part), [Span(0, 0, 0)])))
        else:
            rest = part
            break
    pieces.append(streamed.push(Chunk("r", 0, rest, [], [Span(0, 0, 0)], finish=finish, stop_reason=matched)))
    assert "".join(pieces) == whole
    if matched and not include:
        assert whole == Bytes().decode(ids)[: len(whole)]
        assert Bytes().decode(ids)[len(whole) :].startswith(matched)


@pytest.mark.parametrize(
    ("ids", "finish", "reason", "include", "text"),
    [
        ([65, 66], "length", None, False, "AB"),
        ([65, 66], "stop", 66, False, "A"),
        ([65, 66], "stop", 66, True, "AB"),
        ([65, 300], "stop", None, False, "A"),
        ([65, 66], "abort", None, False, "AB"),
        ([], "abort", None, False, ""),
        ([65, 66, 65, 66], "stop", "AB", False, "AB"),
        ([65, 66, 65, 66], "stop", "AB", True, "ABAB"),
        ([0xC3], "length", None, False, "\ufffd"),
    ],
)
def test_what_ends_a_sequence_loses_its_text(ids, finish, reason, include, text):
    assert final_text(Bytes(), ids, finish, reason, TextOptions(include_stop=include)) == text


def test_what_may_become_a_stop_string_waits():
    streamed = StreamedText(Bytes(), TextOptions(stop=("END",)))
    pushed = [streamed.push(Chunk("r", 0, [i], [0.0], [Span(0, 0, 1)])) for i in b"xEEN."]
    assert pushed == ["x", "", "E", "", "EN."]


async def test_many_short_texts_are_a_long_one(model, monkeypatch):
    """Together they would keep the event loop: a thread encodes them, in order."""
    threads = set()
    encode = model.tokenizer.encode

    def noted(text, special):
        threads.add(threading.current_thread() is threading.main_thread())
        return encode(text, special)

    monkeypatch.setattr(model.tokenizer, "encode", noted)
    texts = [f"{i:04}" for i in range(2000)]
    assert await model.encode_all(texts) == [list(text.encode()) for text in texts]
    assert threads == {False}
    assert await model.encode_all(["A", "B"]) == [[65], [66]]
    assert threads == {False, True}
