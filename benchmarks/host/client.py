"""A load of plain HTTP/1.1 over sockets, cheap enough not to be what is measured."""

import asyncio
import json
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

_READ = 1 << 18


@dataclass(frozen=True)
class Load:
    """`sequences` requests at once, of `prompt` ids each, for `tokens` new tokens each, streamed or whole."""

    sequences: int
    tokens: int
    streamed: bool
    prompt: int = 32
    openai: bool = False  # by OpenAI's route for completions, which other servers have too
    first: int = 0  # number of the first sequence: others have other prompts, which no cache has yet
    seeded: bool = True  # False where a server pays for a seed of each request's own
    models: tuple[str, ...] = ()  # that the sequences name in turn, by OpenAI's route; none = whatever is served

    @property
    def total(self) -> int:
        """New tokens in all."""
        return self.sequences * self.tokens


class Run(NamedTuple):
    """Seconds from the first byte sent to the last one back, and in how many pieces the tokens came."""

    seconds: float
    pieces: int


def measured(url: str, load: Load) -> Run:
    """Put it on. Raises RuntimeError when tokens are missing."""
    return asyncio.run(_run(url, load))


def run(url: str, load: Load) -> float:
    """Its seconds."""
    return measured(url, load).seconds


def run_apart(url: str, load: Load, clients: int) -> float:
    """The same from several processes, each with its part of the sequences; from the start of the first of them to the
    end of the last, without what it takes to start Python."""
    parts = parts_of(load, clients)
    with ProcessPoolExecutor(len(parts), mp_context=get_context("spawn")) as pool:
        list(pool.map(time.sleep, [0.2] * len(parts)))  # they are there
        began = time.perf_counter()
        list(pool.map(run, [url] * len(parts), parts))
        return time.perf_counter() - began


def parts_of(load: Load, clients: int) -> list[Load]:
    """Each client's sequences, as equal as they can be; fewer parts than clients where there are fewer sequences."""
    counts = [(load.sequences + i) // clients for i in range(clients)]
    firsts = [load.first + sum(counts[:i]) for i in range(clients)]
    return [replace(load, sequences=count, first=first) for count, first in zip(counts, firsts, strict=True) if count]


async def _run(url: str, load: Load) -> Run:
    where = urlsplit(url)
    assert where.hostname is not None
    assert where.port is not None
    links = [await asyncio.open_connection(where.hostname, where.port, limit=_READ) for _ in range(load.sequences)]
    began = time.perf_counter()
    found = await asyncio.gather(*(_one(*link, load, seed) for seed, link in enumerate(links, load.first)))
    seconds = time.perf_counter() - began
    for _, writer in links:
        writer.close()
    counts = {tokens for tokens, _ in found}
    if counts != {load.tokens}:
        raise RuntimeError(f"requests came back with {sorted(counts)} tokens, not {load.tokens}")
    return Run(seconds, sum(pieces for _, pieces in found))


async def _one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, load: Load, seed: int) -> tuple[int, int]:
    """Tokens, and in how many pieces."""
    prompt = [(seed * 31 + at * 7) % 40000 + 1 for at in range(load.prompt)]
    body: dict[str, Any] = {"max_tokens": load.tokens, "ignore_eos": True, "stream": load.streamed}
    body |= {"seed": seed} if load.seeded else {}
    body |= {"model": load.models[seed % len(load.models)]} if load.models else {}
    body |= {"prompt": prompt, "return_token_ids": True, "logprobs": 0} if load.openai else {"prompt_ids": prompt}
    payload = json.dumps(body).encode()
    path = "/v1/completions" if load.openai else "/v1/rollout/generate"
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    writer.write(head.encode() + payload)
    pieces = []
    while data := await reader.read(_READ):
        pieces.append(data)
    reply = b"".join(pieces)
    status = reply[: reply.index(b"\r\n")]
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r}: {reply[-500:]!r}")
    if not load.streamed:
        return _tokens_of(reply[reply.index(b"\r\n\r\n") + 4 :]), 1
    # Every event is one line here; chunk sizes of the transfer coding stand on lines of their own.
    events = [count for line in reply.split(b"\n") if line.startswith(b"data: {") and (count := _tokens_of(line[6:]))]
    return sum(events), len(events)


def _tokens_of(document: bytes) -> int:
    """With a logprob for each, as those who train need them."""
    reply, count = msgspec.json.decode(document), 0
    for output in reply.get("outputs") or reply["choices"]:
        logprobs = output["logprobs"]
        count += min(len(output["token_ids"]), len(logprobs if isinstance(logprobs, list) else logprobs["tokens"]))
    return count
