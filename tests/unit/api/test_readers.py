"""What a stream gets of a sample: everything, in order, in as few chunks as it was slow."""

import pytest

from api.errors import Conflict, EngineFailed
from api.generation import LANDED, Flight, Reader
from tests.unit.api.scripted import digest_of
from worker.messages import Chunk, Generate, SamplingParams, Span


def flight(n: int = 1) -> Flight:
    return Flight(Generate("r", [1], SamplingParams(n=n), stream=True))


def chunk(index: int, *tokens: int, length: int = 0, **more) -> Chunk:
    spans = [Span(0, 0, length or len(tokens))]
    return Chunk("r", index, list(tokens), [-float(t) for t in tokens], spans, **more)


def reader(of: Flight, index: int = 0, stirred: list | None = None) -> Reader:
    return Reader(of, index, [].append if stirred is None else stirred.append, lambda chunk: b"")


def test_what_comes_of_a_sequence_while_nobody_takes_it_is_one_chunk():
    one, stirred = flight(2), []
    readers = [reader(one, index, stirred) for index in (0, 1, LANDED)]
    one.add(chunk(0, 1))
    one.add(chunk(1, 7, finish="stop"))
    one.go_on(0, 2, -2.0)
    one.add(chunk(0, 3, length=3, finish="length"))
    assert stirred == readers, "once each, in this order"
    taken = [one.take() for one in stirred]
    assert [part and (part.index, part.token_ids, part.finish, part.spans[-1].end) for part in taken] == [
        (0, [1, 2, 3], "length", 3),
        (1, [7], "stop", 1),
        None,
    ]
    assert taken[0] is not None
    assert taken[0].logprobs == [-1.0, -2.0, -3.0]


def test_a_stream_is_stirred_again_when_it_has_taken_what_there_was():
    one, stirred = flight(), []
    first = reader(one, 0, stirred)
    assert not stirred
    for token in (1, 2):
        one.add(chunk(0, token, length=token))
        assert stirred == [first] * token
        assert first.take().token_ids == [token]
    one.go_on(0, 3, -3.0)
    one.go_on(0, 4, -4.0)
    one.end_aborted(0, digest_of(0))
    assert stirred == [first] * 3
    assert first.take().token_ids == [3, 4]


def test_two_streams_of_a_flight_each_get_all_of_it_at_their_own_pace():
    one = flight()
    early = reader(one)
    one.add(
        chunk(0, 1, top=[[(1, -1.0)]], ranks=[1], masks=[[1, 2]], cached_tokens=3, prompt_logprobs=[[(5, -0.5, 1)]])
    )
    first = early.take()
    one.add(chunk(0, 2, length=2, top=[[(2, -2.0)]], ranks=[2], masks=[[]], finish="stop", stop_reason=2))
    stirred: list[Reader] = []
    late = reader(one, 0, stirred)
    assert stirred == [late]
    rest, whole = early.take(), late.take()
    assert first.prompt_logprobs == whole.prompt_logprobs == [[(5, -0.5, 1)]]
    assert rest.prompt_logprobs is None
    for name in ("token_ids", "logprobs", "top", "ranks", "masks"):
        assert getattr(first, name) + getattr(rest, name) == getattr(whole, name)
    for name in ("finish", "stop_reason", "cached_tokens", "spans"):
        assert getattr(rest, name) == getattr(whole, name)


def test_whoever_watches_a_flight_that_has_landed_hears_of_all_and_of_that():
    one, stirred = flight(2), []
    one.end_aborted(3, digest_of(3))
    readers = [reader(one, index, stirred) for index in (0, 1, LANDED)]
    assert stirred == readers


def test_failures_are_raised():
    failed, broken = flight(), flight()
    end = reader(failed, LANDED)
    failed.fail(Conflict("no"))
    with pytest.raises(Conflict):
        end.take()
    sample = reader(broken)
    broken.add(chunk(0, finish="error", error="it broke"))
    with pytest.raises(EngineFailed, match="it broke"):
        sample.take()


def test_a_flight_that_nobody_has_seen_a_token_of_may_start_over():
    unseen, seen, late = flight(), flight(), flight()
    for one in (unseen, seen):
        reader(one)
    for one in (seen, late):
        one.add(chunk(0, 1))
    reader(late)
    assert [one.can_restart() for one in (unseen, seen, late)] == [True, False, False]
