import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.text import StreamedText, TextOptions, final_text
from tests.unit.api.byte_tokenizer import EOS, ByteTokenizer
from tests.unit.worker.letters import END, OTHER_END, ids, letters
from worker.messages import SamplingParams
from worker.sequence import StopCheck, StopRules

BYTES = ByteTokenizer()


def ends(ids: list[int], stops: list[str], min_tokens: int) -> tuple[list[int], str | None]:
    """As the worker ends a sequence: at the first token that completes a stop string,     from min_tokens on."""
    sampling = SamplingParams(stop=stops, min_tokens=min_tokens, ignore_eos=True)
    check = StopCheck(StopRules(sampling, (), len(ids)), BYTES.stream(skip_special=False))
    for n, token_id in enumerate(ids, 1):
        ending = check.after(token_id, n)
        if ending is not None:
            return ids[:n], ending[1] if ending[0] == "stop" else None
    return ids, None


@given(
    text=st.text(alphabet="abé日🎉|", max_size=14),
    skip=st.booleans(),
    stops=st.lists(st.text(alphabet="abé日", min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 12),
    cuts=st.lists(st.integers(1, 5), max_size=20),
    include=st.booleans(),
)
def test_streamed_pieces_join_to_the_final_text_wherever_chunks_are_cut(text, skip, stops, min_tokens, cuts, include):
    ids, matched = ends([300 if i == ord("|") else i for i in text.encode()], stops, min_tokens)
    finish = "stop" if matched else "length"
    options = TextOptions(skip, include, tuple(stops))
    whole = final_text(BYTES, ids, finish, matched, options)
    streamed, pieces, rest = StreamedText(BYTES, options), [], list(ids)
    for size in cuts:
        part, rest = rest[:size], rest[size:]
        if rest:
            pieces.append(streamed.push(part))
        else:
            rest = part
            break
    pieces.append(streamed.push(rest, finish, matched))
    assert "".join(pieces) == whole
    if matched and not include:
        shown = BYTES.decode(ids, skip)
        assert whole == shown[: len(whole)]
        if not min_tokens:
            full = BYTES.decode(ids, False)
            cut = min(at for stop in stops if (at := full.find(stop)) >= 0)
            assert whole == full[:cut].replace("<300>", "" if skip else "<300>")


@pytest.mark.parametrize(
    ("ids", "finish", "reason", "include", "text"),
    [
        ([65, 66], "length", None, False, "AB"),
        ([65, 66], "stop", 66, False, "A"),
        ([65, 66], "stop", 66, True, "AB"),
        ([65, 300], "stop", None, False, "A"),
        ([65, EOS], "stop", None, False, "A"),
        ([65, 66], "stop", None, False, "AB"),  # its grammar let nothing follow, and there was no end to say so
        ([65, 66], "abort", None, False, "AB"),
        ([], "abort", None, False, ""),
        ([65, 66, 65, 66], "stop", "AB", False, "AB"),
        ([65, 66, 65, 66], "stop", "AB", True, "ABAB"),
        ([0xC3], "length", None, False, "\ufffd"),
    ],
)
def test_what_ends_a_sequence_loses_its_text(ids, finish, reason, include, text):
    options = TextOptions(include_stop=include)
    assert final_text(BYTES, ids, finish, reason, options) == text
    assert StreamedText(BYTES, options).push(ids, finish, reason) == text


def test_what_may_become_a_stop_string_waits():
    streamed = StreamedText(BYTES, TextOptions(stop=("END",)))
    pushed = [streamed.push([i]) for i in b"xEEN."]
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


LONG_DOCUMENT = [{"title": "t", "text": "x" * 100_000}]


@pytest.mark.parametrize(
    ("options", "beside"),
    [
        ({}, False),
        ({"enable_thinking": False, "add_generation_prompt": True, "tools": None}, False),
        ({"reasoning_effort": "high"}, False),
        ({"documents": LONG_DOCUMENT}, True),
        ({"anything": {"of": "a template"}}, True),
        ({"anything": "x" * 10_000}, True),
        ({"tools": [{"function": {"name": "f"}}]}, True),
    ],
)
async def test_what_a_template_is_given_beside_messages_may_be_long_too(model, monkeypatch, options, beside):
    """Written in the event loop, eight megabytes of documents would keep everybody waiting."""
    threads = []

    class Rendering:
        def text(self):
            threads.append(threading.current_thread() is not threading.main_thread())
            return ""

    monkeypatch.setattr(model.tokenizer, "rendering", lambda messages, **given: Rendering())
    await model.chat_text([{"role": "user", "content": "hello"}], **options)
    assert threads == [beside]


def test_a_special_token_that_is_kept_is_shown_and_others_are_not() -> None:
    """Marks of calls are special tokens of some checkpoints."""
    tokenizer = letters()
    sampled = [*ids("ab"), OTHER_END, *ids("c"), END, *ids("d")]
    for kept, shown in ((frozenset(), "abcd"), (frozenset(["<other>", "<tool_call>"]), "ab<other>cd")):
        stream = StreamedText(tokenizer, TextOptions(kept=kept))
        assert "".join(stream.push([token]) for token in sampled) + stream.push([], "length") == shown
