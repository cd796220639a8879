"""What a reader of a stream gets: everything, in order, in as few chunks as it was slow."""

import asyncio

from api.flight import Flight, Sample
from api.generation import Arrivals
from worker.messages import Chunk, Generate, SamplingParams, Span, joined


def flight(n: int = 2) -> Flight:
    return Flight(Generate("r", [1], SamplingParams(n=n), stream=True))


def chunk(index: int, *tokens: int, **more) -> Chunk:
    return Chunk("r", index, list(tokens), [-float(t) for t in tokens], [Span(0, 0, len(tokens))], **more)


async def test_chunks_of_a_sequence_that_wait_together_are_one():
    arrivals, one = Arrivals(), flight()
    for part in (chunk(0, 1), chunk(1, 7), chunk(0, 2), chunk(0, 3, finish="length"), None):
        arrivals.put((one, part))
    taken = [part for _, part in await arrivals.take()]
    assert [part and (part.index, part.token_ids, part.finish) for part in taken] == [
        (0, [1, 2, 3], "length"),
        (1, [7], None),
        None,
    ]
    assert taken[0] is not None
    assert taken[0].logprobs == [-1.0, -2.0, -3.0]


async def test_a_reader_that_waits_gets_each_chunk_as_it_comes():
    arrivals, one, seen = Arrivals(), flight(1), []

    async def read() -> None:
        while True:
            taken = await arrivals.take()
            seen.append([part.token_ids if part else None for _, part in taken])
            if taken[-1][1] is None:
                return

    reader = asyncio.create_task(read())
    for part in (chunk(0, 1), chunk(0, 2), None):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        arrivals.put((one, part))
    await asyncio.wait_for(reader, 1)
    assert seen == [[[1]], [[2]], [None]]


def test_joined_chunks_say_what_they_said_one_by_one():
    prompt = [[(5, -0.5, 1)]]
    parts = [
        chunk(0, 1, top=[[(1, -1.0)]], ranks=[1], masks=[[1, 2]], cached_tokens=3, prompt_logprobs=prompt),
        chunk(0, 2, 3, top=[[(2, -2.0)], [(3, -3.0)]], ranks=[1, 2], masks=[[], [3]]),
        chunk(0, 4, top=[[(4, -4.0)]], ranks=[4], masks=[[]], finish="stop", stop_reason=4),
    ]
    whole, one_by_one = Sample(0), Sample(0)
    whole.add(joined(parts))
    for part in parts:
        one_by_one.add(part)
    assert whole == one_by_one
    assert joined(parts[:1]) is parts[0]
