"""What a reader of a stream gets: everything, in order, in as few chunks as it was slow."""

from api.generation import LANDED, Arrivals, Flight
from worker.messages import Chunk, Generate, SamplingParams, Span


def flight(n: int = 2) -> Flight:
    return Flight(Generate("r", [1], SamplingParams(n=n), stream=True))


def chunk(index: int, *tokens: int, length: int = 0, **more) -> Chunk:
    spans = [Span(0, 0, length or len(tokens))]
    return Chunk("r", index, list(tokens), [-float(t) for t in tokens], spans, **more)


def test_what_comes_of_a_sequence_while_nobody_takes_it_is_one_chunk():
    arrivals, one = Arrivals(lambda: None), flight()
    one.watch(arrivals.put)
    one.add(chunk(0, 1))
    one.add(chunk(1, 7, finish="stop"))
    one.go_on(0, 2, -2.0)
    one.add(chunk(0, 3, length=3, finish="length"))
    taken = [part for _, part in arrivals.take()]
    assert [part and (part.index, part.token_ids, part.finish, part.spans[-1].end) for part in taken] == [
        (0, [1, 2, 3], "length", 3),
        (1, [7], "stop", 1),
        None,
    ]
    assert taken[0] is not None
    assert taken[0].logprobs == [-1.0, -2.0, -3.0]


def test_a_reader_is_stirred_once_for_what_it_has_not_taken():
    one, stirred = flight(1), []
    arrivals = Arrivals(lambda: stirred.append(None))
    one.watch(arrivals.put)
    assert not stirred
    one.add(chunk(0, 1))
    one.go_on(0, 2, -2.0)
    assert len(stirred) == 1
    assert [part.token_ids for _, part in arrivals.take()] == [[1, 2]]
    assert not list(arrivals.take())
    one.go_on(0, 3, -3.0)
    one.end_aborted(0)
    assert len(stirred) == 2
    assert [part if part is None else part.token_ids for _, part in arrivals.take()] == [[3], None]


def test_two_readers_of_a_flight_each_get_all_of_it_at_their_own_pace():
    one, early, late = flight(1), Arrivals(lambda: None), Arrivals(lambda: None)
    one.watch(early.put)
    one.add(
        chunk(0, 1, top=[[(1, -1.0)]], ranks=[1], masks=[[1, 2]], cached_tokens=3, prompt_logprobs=[[(5, -0.5, 1)]])
    )
    first = [part for _, part in early.take()]
    one.add(chunk(0, 2, length=2, top=[[(2, -2.0)]], ranks=[2], masks=[[]], finish="stop", stop_reason=2))
    one.watch(late.put)
    rest, whole = [part for _, part in early.take()], [part for _, part in late.take()]
    assert [len(parts) for parts in (first, rest, whole)] == [1, 2, 2]
    assert first[0].prompt_logprobs == whole[0].prompt_logprobs == [[(5, -0.5, 1)]]
    assert rest[0].prompt_logprobs is None
    for name in ("token_ids", "logprobs", "top", "ranks", "masks"):
        assert getattr(first[0], name) + getattr(rest[0], name) == getattr(whole[0], name)
    for name in ("finish", "stop_reason", "cached_tokens", "spans"):
        assert getattr(rest[0], name) == getattr(whole[0], name)


def test_whoever_watches_a_flight_that_has_landed_hears_of_all_and_of_that():
    one, heard = flight(), []
    one.end_aborted(3)
    one.watch(lambda _, index: heard.append(index))
    assert heard == [0, 1, LANDED]
