"""What a reader of a stream gets: everything, in order, in as few chunks as it was slow."""

import asyncio

from api.flight import LANDED, Flight
from api.generation import Arrivals
from worker.messages import Chunk, Generate, SamplingParams, Span


def flight(n: int = 2) -> Flight:
    return Flight(Generate("r", [1], SamplingParams(n=n), stream=True))


def chunk(index: int, *tokens: int, length: int = 0, **more) -> Chunk:
    spans = [Span(0, 0, length or len(tokens))]
    return Chunk("r", index, list(tokens), [-float(t) for t in tokens], spans, **more)


async def test_what_comes_of_a_sequence_while_nobody_takes_it_is_one_chunk():
    arrivals, one = Arrivals(), flight()
    one.watch(arrivals.put)
    one.add(chunk(0, 1))
    one.add(chunk(1, 7, finish="stop"))
    one.go_on(0, 2, -2.0)
    one.add(chunk(0, 3, length=3, finish="length"))
    taken = [part for _, part in await arrivals.take()]
    assert [part and (part.index, part.token_ids, part.finish, part.spans[-1].end) for part in taken] == [
        (0, [1, 2, 3], "length", 3),
        (1, [7], "stop", 1),
        None,
    ]
    assert taken[0] is not None
    assert taken[0].logprobs == [-1.0, -2.0, -3.0]


async def test_a_reader_that_waits_gets_each_token_as_it_comes():
    arrivals, one, seen = Arrivals(), flight(1), []
    one.watch(arrivals.put)

    async def read() -> None:
        while True:
            taken = await arrivals.take()
            seen.append([part.token_ids if part else None for _, part in taken])
            if taken[-1][1] is None:
                return

    reader = asyncio.create_task(read())
    for came in (lambda: one.add(chunk(0, 1)), lambda: one.go_on(0, 2, -2.0), lambda: one.end_aborted(0)):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        came()
    await asyncio.wait_for(reader, 30)
    assert seen == [[[1]], [[2]], [[], None]]


async def test_two_readers_of_a_flight_each_get_all_of_it_at_their_own_pace():
    one, early, late = flight(1), Arrivals(), Arrivals()
    one.watch(early.put)
    one.add(
        chunk(0, 1, top=[[(1, -1.0)]], ranks=[1], masks=[[1, 2]], cached_tokens=3, prompt_logprobs=[[(5, -0.5, 1)]])
    )
    first = [part for _, part in await early.take()]
    one.add(chunk(0, 2, length=2, top=[[(2, -2.0)]], ranks=[2], masks=[[]], finish="stop", stop_reason=2))
    one.watch(late.put)
    rest, whole = [part for _, part in await early.take()], [part for _, part in await late.take()]
    assert [len(parts) for parts in (first, rest, whole)] == [1, 2, 2]
    assert first[0].prompt_logprobs == whole[0].prompt_logprobs == [[(5, -0.5, 1)]]
    assert rest[0].prompt_logprobs is None
    for name in ("token_ids", "logprobs", "top", "ranks", "masks"):
        assert getattr(first[0], name) + getattr(rest[0], name) == getattr(whole[0], name)
    for name in ("finish", "stop_reason", "cached_tokens", "spans"):
        assert getattr(rest[0], name) == getattr(whole[0], name)


async def test_a_reader_that_was_cancelled_is_told_nothing():
    arrivals, one = Arrivals(), flight(1)
    one.watch(arrivals.put)
    reader = asyncio.create_task(arrivals.take())
    await asyncio.sleep(0)
    reader.cancel()
    one.go_on(0, 1, -1.0)
    await asyncio.gather(reader, return_exceptions=True)
    one.end_aborted(0)
    assert [part if part is None else part.token_ids for _, part in await arrivals.take()] == [[1], None]


def test_whoever_watches_a_flight_that_has_landed_hears_of_all_and_of_that():
    one, heard = flight(), []
    one.end_aborted(3)
    one.watch(lambda _, index: heard.append(index))
    assert heard == [0, 1, LANDED]
