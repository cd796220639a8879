"""A scheduler and a fake engine in one hand: `rig` runs requests and checks what comes out against a replay."""

import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout_client.spans import Span as ReplySpan
from rollout_client.spans import forward_passes
from tests.engine_cases import in_one_array
from tests.fake_engine import FakeAdapters, FakeEngine, adapted, fake_logits, mixed_logits, views_hash
from worker.engine.base import CANNOT_BE_SAMPLED, Drawn, EngineSpec, Extras, Float32, ForwardBatch, Tops
from worker.grammar import Compiled, Grammars, Refused
from worker.logit_edits import LogitEdits
from worker.membership import update_sequences
from worker.messages import Chunk, Chunks, Generate, SamplingParams, Span, encode
from worker.sampler import Draw, Pick, RowSampler, Sampler
from worker.scheduler import Scheduler
from worker.scoring import Scorer
from worker.sequence import Line
from worker.softmax import Cut, Softmax, largest
from worker.softmax import logprob as row_logprob
from worker.tokenizer import Tokenizer
from worker.versions import NO_VERSION, Version


def digest_of(content: int) -> str:
    """Names the weights that are made of a number."""
    return f"{content:016x}"


def content_of(digest: str) -> int:
    """The number that they are made of."""
    return int(digest, 16)


@dataclass
class Result:
    """Everything one sequence's chunks said."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    claims: list[Span] = field(default_factory=list)
    """Its spans, with the digests that `Rig.check_replay` looks weights up by."""
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        """Without digests, which are then those of the numbers: `Rig.bind` was told of no other content."""
        for span in self.claims:
            assert span.digest == digest_of(span.version)
            assert span.adapter_digest == ("" if span.adapter_version is None else digest_of(span.adapter_version))
        return [msgspec.structs.replace(span, digest="", adapter_digest="") for span in self.claims]

    @property
    def last(self) -> Chunk:
        return self.chunks[-1]

    @property
    def finish(self) -> str | None:
        return self.last.finish


class Ahead:
    """`Logits` and `Drawing` of a device that computes at once: it stands for one that is still busy."""

    whole = True

    def __init__(self, engine: FakeEngine, rows: Float32) -> None:
        self.engine, self.rows = engine, rows

    def __getitem__(self, rows: Any) -> Any:
        return self.rows[rows]

    def wait(self) -> None:
        pass

    def through(self) -> bool:
        return True

    def begin(
        self, rows: Any, inverse_temperature: Any, greedy: Any, numbers: Any, cuts: Any, extras: Any = None
    ) -> "Ahead":
        count = len(rows)
        false = [False] * count
        extras = extras or Extras([None] * count, [0] * count, [()] * count, false, false)
        masks = []
        found = []
        for i, row in enumerate(rows.tolist()):
            logits = self.rows[row].copy()
            if extras.edits[i] is not None:
                assert extras.edits[i].apply(logits) == "", "whoever cannot go on is not drawn"
            cut = Cut(int(cuts.top_k[i]), float(cuts.top_p[i]), float(cuts.min_p[i]))
            how = (float(inverse_temperature[i]), cut, bool(greedy[i]), numbers[i : i + 1])
            drawn, left = self._draw(
                self.rows[row], logits, *how, extras.untouched[i], extras.tops[i], extras.others[i]
            )
            found.append(drawn)
            masks.append(left if extras.marked[i] else None)
        self.found = self._columns(found)._replace(masks=masks)
        return self

    def _draw(
        self, made: Any, logits: Any, inverse: float, cut: Any, greedy: bool, number: Any, untouched: bool, *asked: Any
    ) -> Any:
        sampler, finite = RowSampler(self.engine.spec.vocab_size), bool(np.isfinite(made).all())
        with np.errstate(all="ignore"):
            spread = sampler.spread(logits, inverse, cut, greedy=greedy)
        if not (finite and np.isfinite(spread.weighed.peak)):
            return (0, 0.0, False, finite, ([], [], 0)), None
        left = np.zeros(-(-len(logits) // 32) * 32, np.bool_)
        left[np.flatnonzero(logits > -np.inf) if spread.ids is None else spread.ids] = True
        token, shown = sampler.token(spread, number), (made, 1.0) if untouched else (logits, inverse)
        drawn = token, *self._reported(*shown, token, *asked)
        return drawn, np.packbits(left, bitorder="little").view(np.int32)

    def _reported(self, row: Any, inverse: float, token: int, tops: int, others: Any) -> Any:
        softmax = Softmax(self.engine.spec.vocab_size)
        with np.errstate(all="ignore"):
            norm = softmax.weigh(row, inverse).norm
        ids = list(others) or largest(softmax.scaled, tops).tolist() if tops or others else []
        of_ids = [max(CANNOT_BE_SAMPLED, row_logprob(softmax.scaled, i, norm)) for i in ids]
        rank = int(np.count_nonzero(softmax.scaled > softmax.scaled[token])) + 1
        return row_logprob(softmax.scaled, token, norm), True, False, (ids, of_ids, rank)

    def _columns(self, found: Any) -> Drawn:
        tokens, logprobs, finite, closed, reports = zip(*found, strict=True)
        width = max(len(ids) for ids, _, _ in reports)
        ids = np.array([[*ids, *[-1] * (width - len(ids))] for ids, _, _ in reports], np.int64)
        of_ids = np.array([[*of, *[0.0] * (width - len(of))] for _, of, _ in reports])
        tops = Tops(
            ids.reshape(len(found), width),
            of_ids.reshape(len(found), width),
            np.array([rank for _, _, rank in reports]),
        )
        return Drawn(np.array(tokens), np.array(logprobs), np.array(finite), np.array(closed), tops)

    def score(self, rows: Any, inverse_temperature: Any, tokens: Any, tops: Any) -> Drawn:
        found = []
        for row, inverse, token, wanted in zip(rows, inverse_temperature, tokens, tops, strict=True):
            sound = bool(np.isfinite(self.rows[row]).all())
            reported = self._reported(self.rows[row], float(inverse), int(token), wanted, ())
            found.append((token, *reported) if sound else (0, 0.0, False, False, ([], [], 0)))
        return self._columns(found)

    def drawn(self) -> Any:
        return self.found

    def follow(self, batch: ForwardBatch, sources: Any) -> "Ahead":
        tokens = self.found.tokens[sources].astype(np.int32)
        logits = self.engine.forward(ForwardBatch(**{**vars(batch), "token_ids": tokens}))
        assert logits is not None
        return Ahead(self.engine, logits)


@functools.cache
def _weights_of(content: int) -> int:
    """What the engine prepares of weights that are made of this number."""
    return views_hash({"w": np.array([content])})


@functools.cache
def _adapter_of(name: str, content: int) -> int:
    """What stands for an adapter that is made of this number."""
    return views_hash(Rig.adapter_views(name, content))


_OF_REQUEST = ("stream", "priority", "cache_salt", "score_from", "adapter", "weight_version", "weight_digest")


class Rig:
    """One replica without a loop. The first weights have epoch 100; others, and adapters, the next one."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 32,
        max_model_len: int = 64,
        eos: tuple[int, ...] = (),
        kv_weights: bool = True,
        max_batch: int = 8,
        max_tokens: int = 16,
        tokenizer: Tokenizer | None = None,
        device: bool = False,
        **options: Any,
    ) -> None:
        """device: steps are launched ahead, as the event loop does it for an engine on a device."""
        self.device, self.flight, self.flights = device, None, 0
        self.spec = EngineSpec(vocab_size, max_model_len, block_size, num_blocks, eos)
        self.engine = FakeEngine(self.spec, kv_weights=kv_weights)
        self.engine.allocate_kv()
        self.scheduler = Scheduler(self.spec, tokenizer, max_batch=max_batch, max_tokens_per_step=max_tokens, **options)
        self.grammars = Grammars(tokenizer, vocab_size, eos)
        self.live: Version
        self.former: Version | None = None
        self.sent: dict[str, Generate] = {}
        self.results: dict[tuple[str, int], Result] = {}
        self.batches: list[ForwardBatch] = []
        self.epochs = itertools.count(100)
        self.speculative = bool(options.get("speculative"))
        self.live = NO_VERSION
        self.bind(0)
        self.former = None

    def weights(self, content: int) -> int:
        return _weights_of(content)

    def bind(self, version: int, content: int | None = None) -> None:
        """content: what the weights are made of; None = the version's number."""
        self.take_in()
        digest = digest_of(version if content is None else content)
        self.live, self.former = Version(version, next(self.epochs), digest), self.live
        self.engine.bind(self.weights(content_of(digest)))

    def update(self, policy: Any, version: int, content: int | None = None) -> None:
        self.bind(version, content)
        update_sequences(self.scheduler, policy, self.live)
        self.collect()

    def adapter(self, name: str, version: int, policy: Any = "keep", content: int | None = None) -> None:
        """Another version of an adapter is live; the engine forgets those that nobody computes with."""
        self.take_in()
        epoch, adapters = next(self.epochs), self.engine.adapters
        assert isinstance(adapters, FakeAdapters)
        content = version if content is None else content
        spans, flat = in_one_array(self.adapter_views(name, content))
        adapters.hold(epoch, adapters.plan(name, spans, (), "float32"), flat)
        self.scheduler.adapter_live(name, Version(version, epoch, digest_of(content)), policy)
        self.forget_adapters()
        self.collect()

    def unload(self, name: str) -> None:
        self.take_in()
        self.scheduler.adapter_gone(name)
        self.forget_adapters()
        self.collect()

    def forget_adapters(self) -> None:
        adapters, used = self.engine.adapters, self.scheduler.adapter_epochs()
        assert isinstance(adapters, FakeAdapters)
        for epoch in adapters.held.keys() - used - {live.epoch for live in self.scheduler.adapters.values()}:
            adapters.forget(epoch)

    @staticmethod
    def adapter_views(name: str, content: int) -> dict[str, Any]:
        return {name: np.array([content])}

    def add(self, request_id: str, prompt: list[int], **fields: Any) -> None:
        request = {name: fields.pop(name) for name in _OF_REQUEST if name in fields}
        self.sent[request_id] = Generate(request_id, prompt, SamplingParams(**fields), **request)
        self.scheduler.add(b"api", self.sent[request_id], self.compiled(fields.get("grammar", "")))

    def compiled(self, grammar: str) -> Compiled | Refused | None:
        """What becomes of a grammar; waits for it."""
        while grammar and (found := self.grammars.look_up(grammar)) is None:
            time.sleep(0.001)
        return found if grammar else None

    def take_in(self) -> None:
        flight, self.flight = self.flight, None
        if flight is not None and self.scheduler.launched_ahead:
            self.scheduler.apply(flight)
            self.collect()

    def go_on_ahead(self) -> bool:
        flight = self.flight
        if flight is None or not self.scheduler.launched_ahead:
            self.flight = None
            return False
        self.flights += 1
        self.flight = self.scheduler.follow(flight)
        self.scheduler.apply(flight)
        return True

    def schedule(self, **options: Any) -> ForwardBatch | None:
        self.take_in()
        return self.scheduler.schedule(self.live, former=self.former, **options)

    def forward(self, batch: ForwardBatch) -> Float32:
        """As all ranks do it: a batch of the weights before the live ones is computed with those."""
        if batch.former:
            assert self.former is not None
            self.engine.bind(self.weights(content_of(self.former.digest)))
        logits = self.engine.forward(ForwardBatch.unpack(batch.pack()))
        self.engine.bind(self.weights(content_of(self.live.digest)))
        assert logits is not None
        return logits

    def step(self, **options: Any) -> bool:
        if self.go_on_ahead():
            self.collect()
            self.check_blocks()
            return True
        batch = self.schedule(**options)
        if batch is not None:
            self.batches.append(batch)
            logits = self.forward(batch)
            if self.device:
                on_device = Ahead(self.engine, logits)
                self.flight = self.scheduler.follow(on_device)
                self.scheduler.apply(on_device)
            else:
                self.scheduler.apply(logits)
        self.collect()
        self.check_blocks()
        return batch is not None

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if self.scheduler.idle:
                break
            self.step()
        self.take_in()
        self.collect()
        assert self.scheduler.idle, "no progress"
        assert self.scheduler.blocks_used == 0

    def collect(self) -> None:
        for item in self.scheduler.take_outputs().get(b"api", []):
            for chunk in self._chunks(item) if isinstance(item, Line) else [item]:
                self._take(chunk)

    def _chunks(self, line: Line) -> Iterator[Chunk]:
        """As the API takes a line: each sequence has one more token, of the weights that made the one before it."""
        for sequence, token, logprob in zip(line.sequences, line.tokens, line.logprobs, strict=True):
            name = sequence.request.request_id, sequence.index
            before = self.results[name].last
            *spans, last = before.spans
            spans.append(msgspec.structs.replace(last, end=last.end + 1))
            yield Chunk(*name, [int(token)], [float(logprob)], spans, cached_tokens=before.cached_tokens)

    def _take(self, chunk: Chunk) -> None:
        assert encode(Chunks([chunk])), "it can be sent"
        result = self.results.setdefault((chunk.request_id, chunk.index), Result())
        assert not result.chunks or result.finish is None, "a chunk after the last"
        result.tokens += chunk.token_ids
        result.logprobs += chunk.logprobs
        result.claims = chunk.spans
        result.chunks.append(chunk)

    def check_blocks(self) -> None:
        """Counts equal holders, and nothing is both held and available."""
        batcher, pool = self.scheduler._batcher, self.scheduler._kv.pool
        holders = Counter(block for sequence in batcher.running for block in sequence.kv.table)
        assert all(not sequence.kv.table for sequence in batcher.waiting)
        assert {b: pool.count(b) for b in range(pool.num_blocks) if pool.count(b)} == dict(holders)
        assert pool.available == pool.num_blocks - len(holders)

    def expected(self, request_id: str, index: int, known: list[int], logits: Float32) -> Draw:
        """What must be drawn from these logits after `known` (prompt and output)."""
        g = self.sent[request_id]
        done = len(known) - len(g.prompt_ids)
        stops = frozenset(self.spec.eos_token_ids if not g.sampling.ignore_eos else ()) | set(g.sampling.stop_token_ids)
        grammar = self.compiled(g.sampling.grammar)
        matcher = grammar.matcher(stops) if isinstance(grammar, Compiled) else None
        edits = LogitEdits(g.sampling, g.prompt_ids, stops, matcher)
        for token in known[len(g.prompt_ids) :]:
            edits.record(token)
        pick = Pick(0, g.sampling, edits, g.sampling.seed or 0, index, done)
        return Sampler(self.spec.vocab_size).sample(logits[None], [pick])[0]

    def check_replay(self, request_id: str, index: int = 0) -> None:
        """Every token, and every logprob of the prompt, follows from what the spans claim of each position."""
        result, sent = self.results[request_id, index], self.sent[request_id]
        prompt, sampling = sent.prompt_ids, sent.sampling
        assert self.covers(result)
        scorer = Scorer(self.spec.vocab_size)
        for one in forward_passes([ReplySpan(*msgspec.structs.astuple(s)) for s in result.claims], len(prompt)):
            for at in range(one.start, one.end):
                known, token = prompt + result.tokens[:at], result.tokens[at]
                adapters = [content_of(digest) for digest in one.adapter_digests[: len(known)]]
                assert bool(adapters) == bool(sent.adapter)
                contents = [content_of(digest) for digest in one.digests[: len(known)]]
                logits = self.logits(known, contents, sent.adapter, adapters)
                if self.speculative and sampling.temperature > 0:  # which token depends on the drafts, too
                    score = scorer.score(logits[None], [token], sampling)
                    assert isinstance(score, list)
                    draw = Draw(token, score[0][0][1])
                else:
                    draw = self.expected(request_id, index, known, logits)
                assert draw.token == token, f"{request_id}/{index} token {at} of {result.claims}"
                assert draw.logprob == result.logprobs[at]
        for chunk in result.chunks:
            for at, said in enumerate(chunk.prompt_logprobs or (), start=max(1, sent.score_from)):
                first = result.claims[0]
                adapters = [content_of(first.adapter_digest)] * at if sent.adapter else []
                logits = self.logits(prompt[:at], [content_of(first.digest)] * at, sent.adapter, adapters)
                score = scorer.score(logits[None], [prompt[at]], sampling)
                assert isinstance(score, list)
                assert score[0][0][1] == said[0][1], f"{request_id} prompt token {at} of {result.claims}"

    def logits(
        self, known: list[int], contents: list[int], adapter: str = "", of_adapter: Sequence[int] = ()
    ) -> Float32:
        """Of the token after `known`, whose positions weights of these contents computed."""
        weights = [self.weights(content) for content in contents]
        if adapter:
            weights = [
                adapted(base, _adapter_of(adapter, content)) for base, content in zip(weights, of_adapter, strict=True)
            ]
        if not self.engine.kv_weights:
            return fake_logits(weights[-1], known, self.spec.vocab_size)
        return mixed_logits(weights, known, self.spec.vocab_size)

    def covers(self, result: Result) -> bool:
        """Spans are half-open, adjoining, and cover the tokens."""
        ends = [0, *(span.end for span in result.claims)]
        starts = [span.start for span in result.claims]
        return bool(result.claims) and starts == ends[:-1] and ends[-1] == len(result.tokens)


@pytest.fixture
def rig() -> Callable[..., Rig]:
    """Makes rigs; keywords are sizes and Scheduler options."""
    return Rig
