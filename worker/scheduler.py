"""Requests in, steps out, tokens back: what the event loop knows of generation.

Per tick the loop calls `schedule`, runs the engine, then `apply` (or `discard`), then `take_outputs`. Everything
else may be called between ticks. Each token is stamped with the version given to the `schedule` whose step made its
logits. One owner thread. Nothing a request contains makes a method raise: it ends with finish "error" instead.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping

import numpy as np

from rollout_client.protocol import AdapterInFlight
from worker.batcher import Batcher, Step
from worker.cohort import Cohort
from worker.drafting import Drafting, Judged
from worker.engine.base import Drawn, EngineSpec, Float32, ForwardBatch, Logits
from worker.generation_metrics import GenerationMetrics
from worker.grammar import Compiled, Refused
from worker.kv_cache import KvCache, KvState
from worker.live_adapters import LiveAdapters
from worker.logit_edits import LogitEdits
from worker.messages import Chunk, FinishReason, Generate
from worker.pace import Pace
from worker.sampler import Begun, Draw, LogprobsMode, Pick, Sampler, draws_of, on_device
from worker.scoring import Scored, Scorer, Scoring
from worker.sequence import Line, Request, Sequence, StopCheck, accepted, refusal
from worker.tokenizer import Tokenizer
from worker.versions import NO_VERSION, Version

FEW = 3
"""Sequences that cost less in arrays than one by one: a step of the cohort is some forty operations, however few there
are. On a device arrays are worth it for one: a short step must not wait for what the host does beside it."""


class Scheduler:
    """Continuous batching over a paged KV cache.

    max_batch: sequences in a step. max_tokens_per_step: decodes plus prefill chunks, >= max_batch. max_step_s: what
    prompts are cut to. tokenizer: for stop strings. speculative: the engine drafts. sampler: the engine's own; None =
    in numpy, from its logits. clock: seconds.
    """

    def __init__(
        self,
        spec: EngineSpec,
        tokenizer: Tokenizer | None,
        *,
        max_batch: int,
        max_tokens_per_step: int,
        max_step_s: float = math.inf,
        logprobs_mode: LogprobsMode = "processed",
        prefix_caching: bool = True,
        speculative: bool = False,
        sampler: Sampler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        least = "twice max_batch" if speculative else "max_batch"
        if max_tokens_per_step < max_batch * (1 + speculative):
            raise ValueError(f"max_tokens_per_step ({max_tokens_per_step}) is below {least} ({max_batch})")
        self._speculative = speculative
        self._spec = spec
        self._context = min(spec.max_model_len, spec.num_blocks * spec.block_size)
        self._tokenizer = tokenizer
        self._max_batch = max_batch
        self._max_tokens = max_tokens_per_step
        self._pace = Pace(max_step_s)
        self._clock = clock
        self._metrics = GenerationMetrics()
        self._kv = KvCache(spec.num_blocks, spec.block_size, prefix_caching=prefix_caching)
        self._cohort = Cohort(self._kv, self._metrics, spec.vocab_size, max_batch)
        self._adapters = LiveAdapters()
        self._batcher = Batcher(self._kv, self._cohort, self._adapters, max_batch, self._metrics)
        self._sampler = sampler or Sampler(spec.vocab_size, logprobs_mode)
        self._scorer = Scorer(spec.vocab_size, logprobs_mode)
        self._drafting = Drafting(self._sampler, self._kv, self._metrics, self._advance)
        self._requests: dict[Request, None] = {}  # in order of arrival
        self._empty: list[Request] = []
        self._pinned: list[Request] = []
        self._of_former = False  # the last choice began with a step of the former weights
        self._arrivals = 0
        self._live = NO_VERSION
        self._step: Step | None = None
        self._begun: Begun | None = None  # its tokens, when a device draws them
        self._begun_of = 0  # the cohort's `changes` then
        self._next: Step | None = None  # launched behind it
        self._outputs: dict[bytes, list[Chunk | Line]] = {}
        self._least = FEW  # sequences that are kept in arrays

    def add(self, origin: bytes, g: Generate, grammar: Compiled | Refused | None = None) -> None:
        """Queue a request of the API connection `origin`. grammar: what became of the one that it names."""
        self._arrivals += 1
        request = accepted(origin, g, self._arrivals, self._clock(), self._spec, self._context, self._speculative)
        self._metrics.counters["requests"] += 1
        self._requests[request] = None
        problem = refusal(g, self._spec, self._context, has_text=self._tokenizer is not None)
        if isinstance(grammar, Compiled):
            request.grammar = grammar.of_request()
        elif g.sampling.grammar:
            problem = problem or (grammar.why if grammar is not None else "the grammar was not compiled")
        request.fault = "request" if problem else ""
        self._batcher.queue(self._sequence(request, 0, list(g.prompt_ids), KvState(g.cache_salt), sound=not problem))
        if problem:
            self._end_request(request, "error", problem)
        elif g.adapter and g.adapter not in self._adapters.by_name:  # it went while the request was held
            self._end_without_adapter(request)
        elif not request.rules.limit and not request.scoring:
            self._empty.append(request)
        elif request.pinned is not None:
            self._pinned.append(request)

    def abort(self, ids: Collection[str] | None) -> int:
        """End requests by exact id, or all (None); partial results come out as final chunks. Returns how many."""
        self.discard()
        chosen = [r for r in self._requests if ids is None or r.request_id in ids]
        for request in chosen:
            self._end_request(request, "abort")
        return len(chosen)

    def schedule(self, live: Version, *, admit: bool = True, former: Version | None = None) -> ForwardBatch | None:
        """The next step, to run under these weights; None = nothing to run.

        admit=False lets in nobody who has not begun: for a drain, until `running` is 0. former: weights that the step
        may be of instead (its batch says so), every other one while a request is pinned to them.
        """
        assert self._step is None, "the last step was neither applied nor discarded"
        self._live = live
        self._batcher.enter(live)
        while admit and self._empty:  # they want no token and no score, only to know the version
            request = self._empty.pop()
            if request.live:
                self._end_request(request, "length")
        for draft, of_former in self._turns(former):
            weights = former if of_former and former else live
            budget = self._pace.budget(self._max_tokens)
            step = Step(weights, budget, self._max_batch, self._pace, draft, of_former)
            if draft:
                self._batcher.fill_draft(step)
            else:
                self._batcher.fill(step, self._clock(), admit=admit)
            if not step.empty:
                self._step = step
                return step.batch(self._kv, self._cohort)
        return None

    def venture(self, weights: Version) -> ForwardBatch | None:
        """The next step under weights that are about to be live, so that a device computes while that is decided; None
        where not all that run decode together. Nobody begins, and no token comes of it before `enter` says the same
        weights; `enter` of others throws it away.
        """
        assert self._step is None, "the last step was neither applied nor discarded"
        cohort, running = self._cohort, self._batcher.running
        others = [sequence for sequence in running if sequence.row < 0]
        if not running or self._batcher.crowded or any(one.partial or one.request.former for one in others):
            return None
        if any(one.pending != 1 for one in others) or not cohort.reserve(spare=len(others)):
            return None
        self._step = Step(weights, self._max_tokens, self._max_batch, self._pace)
        if len(cohort):
            self._step.take_cohort(cohort)
        for sequence in others:
            reserved = self._kv.reserve(sequence.kv, 1)
            assert reserved, "there is a block for each"
            self._step.take(sequence, 1)
        return self._step.batch(self._kv, cohort)

    def bring_up(self) -> None:
        """Give every sequence all of its tokens. `enter` does so, too, and has less to do after this."""
        self._cohort.bring_up()

    def _turns(self, former: Version | None) -> list[tuple[bool, bool]]:
        """What the step may be, the first that is not empty: a draft or not, of the former weights or not."""
        # The last: what the step before it let in may have had everything in the cache.
        live = [(draft, False) for draft in ((True, False, True) if self._speculative else (False,))]
        if not self._place_pinned(former):
            return live
        self._of_former = not self._of_former
        return [(False, True), *live] if self._of_former else [*live, (False, True)]

    def _place_pinned(self, former: Version | None) -> bool:
        """Say of each pinned request which weights compute it, end it when they are not there; whether any is computed
        with the former ones.
        """
        self._pinned = [request for request in self._pinned if request.live]
        for request in self._pinned:
            pinned = request.pinned
            assert pinned is not None, "only those that are"
            if pinned.fits(self._live):
                self._place(request, None)
            elif former is not None and pinned.fits(former):
                self._place(request, former)
            else:
                other = f"and {former.version} was before it" if former else "and the one before it is held no more"
                request.fault = "version"
                why = f"{pinned} is not here: {self._live.version} is live, {other}"
                self._end_request(request, "error", why)
        return any(request.former for request in self._pinned)

    def _place(self, request: Request, former: Version | None) -> None:
        if former != request.former:
            for sequence in [sequence for sequence in request.live if sequence.running]:
                self._batcher.send_back(sequence)
            request.former = former
            for sequence in request.live:
                sequence.kv.base = former

    def draw(self, logits: Logits) -> bool:
        """Begin to draw the tokens of the step under way, if that has not begun; False where `follow` can only be None
        and the host may have to draw.
        """
        step, cohort = self._step, self._cohort
        assert step is not None, "no step is under way"
        if self._begun is None:
            picks = self._decoding(step)
            if picks is None:
                return False
            sources = cohort.sources(step.together, step.changes)
            self._begun = self._sampler.begin(logits, cohort.asked(sources) if len(cohort) else None, picks)
            self._begun_of = cohort.changes
        return True

    def draw_together(self, logits: Logits) -> None:
        """Begin to draw the tokens of a step that may be thrown away. Only where a drawing leaves nothing behind that
        one done again would find: of the cohort, whose logits nobody edits.
        """
        if self._step is not None and not self._step.rows:
            self.draw(logits)

    def follow(self, logits: Logits, weights: Version | None = None) -> Logits | None:
        """Begin to draw the tokens of the step under way, and launch the step after it behind them, before they are
        known: a device goes on at once while the host takes them in. All tokens before them are, so that penalties and
        grammars are as exact as ever.

        None when the next step cannot be known yet: not all that run have decoded in this one, somebody may join the
        cohort, or waits to be let in, or blocks are short; or when the host must draw. Of a sequence that turns out to
        have ended, the token that is computed too many is dropped; what it writes lies in blocks that whoever gets them
        next writes later, as a device does one step after the other. weights: of the next step, where they are not
        those of this one: about to be live, as in `venture`.
        """
        step, cohort = self._step, self._cohort
        assert step is not None, "no step is under way"
        if not self.draw(logits):
            return None
        assert self._begun is not None
        rows = [row for row in step.rows if row.sequence.running]
        going = cohort.going()
        staying = [i for i, row in enumerate(rows) if row.sequence.length + 1 < row.sequence.request.rules.limit]
        if not (len(going) or staying) or self._batcher.lets_in or not cohort.reserve(ahead=1, rows=going):
            return None
        if not all(self._kv.extend(rows[i].sequence.kv, rows[i].start + 2) for i in staying):
            return None
        ahead = Step(weights or step.weights, 0, 0, self._pace)
        ahead.together = [cohort.sequences[row] for row in going.tolist()]
        ahead.changes = cohort.changes if len(going) == len(cohort) else -1
        ahead.rows = [rows[i].next for i in staying]
        drawn = np.concatenate((going, np.array(staying, np.int64) + len(cohort)))
        launched = self._begun.follow(ahead.batch_ahead(self._kv, cohort, going), drawn.astype(np.int32))
        self._next = ahead if launched is not None else None
        return launched

    def _decoding(self, step: Step) -> list[Pick] | None:
        """Picks of the step's rows, if it is of all that run, each decodes, and a device draws all of them."""
        rows = [(at, row.sequence) for at, row in enumerate(step.rows, len(step.together)) if row.sequence.running]
        if step.former or len(self._cohort) + len(rows) != len(self._batcher.running):
            return None
        if not (rows or len(self._cohort)):  # all that the step was launched for have ended since
            return None
        if not all(row.decodes for row in step.rows):
            return None
        if any(not on_device(one.request.sampling) or self._may_join(one) for _, one in rows):
            return None
        return [sequence.pick(at) for at, sequence in rows]

    @property
    def under_former(self) -> bool:
        """The step under way is of the former weights."""
        return self._step is not None and self._step.former

    @property
    def launched_under(self) -> Version | None:
        """The weights of the step under way."""
        return None if self._step is None else self._step.weights

    @property
    def launched_ahead(self) -> bool:
        """A step was launched ahead between two ticks, and nothing has thrown it away since."""
        return self._step is not None

    def apply(self, logits: Float32 | Logits, seconds: float = 0.0) -> None:
        """Sample from logits [L, vocab] of the last scheduled step, advance, finish. seconds: how long it took; 0 =
        nothing is learned from it.
        """
        step, self._step = self._step, self._next
        begun, self._begun, self._next = self._begun, None, None
        assert step is not None, "no step is under way"
        assert begun is None or self._begun_of == self._cohort.changes, "whoever changes the cohort discards the step"
        step.took(seconds)
        self._kv.settle()
        self._least = FEW if isinstance(logits, np.ndarray) else 1
        if step.draft:
            assert isinstance(logits, np.ndarray), "no device drafts"
            self._drafting.propose(step, logits)
            return
        now = self._clock()
        drawn, draws = begun.drawn() if begun is not None else (None, [])
        decoding = [row.sequence for row in step.rows if row.sequence.running]  # whose picks `begun` has
        if len(self._cohort) and not step.former:
            sources = self._cohort.sources(step.together, step.changes)
            self._go_on(step, drawn or self._sampler.draw(logits, self._cohort.asked(sources)), now)
        picks: list[Pick] = []
        drawing: list[Sequence] = []
        judged: list[Judged] = []
        scores = self._scores(step, logits)
        at = len(step.together)
        for row in step.rows:
            sequence = row.sequence
            at += row.wanted
            if not sequence.running:  # it ended after the step was launched
                continue
            self._kv.advance(sequence.kv, sequence.tokens, row.length - row.proposed)
            unscored = self._scored(sequence, scores[sequence]) if row.scored else None
            if unscored is not None:
                self._end_in_error(sequence, unscored, step)
            elif begun is not None:  # its picks are of the same rows
                continue
            elif row.samples and sequence.draft is not None:
                judged.append(Judged(sequence, sequence.pick(at - 1 - row.proposed)))
            elif row.samples:
                members = [sequence] if sequence.request.forked else self._fork(sequence)
                drawing.extend(members)
                picks.extend(member.pick(at - 1) for member in members)
            elif row.reaches_end:
                self._fork(sequence)
                self._end_request(sequence.request, "length")
        if judged:
            assert isinstance(logits, np.ndarray), "no device drafts"
            for sequence, pick in self._drafting.judge(judged, logits, step, now):  # one more token each
                drawing.append(sequence)
                picks.append(pick)
        if begun is not None:
            drawing = decoding
        elif picks:
            draws = self._sampler.sample(logits, picks)
        for sequence, draw in zip(drawing, draws, strict=True):
            if sequence.running:  # a sibling's bad logits end it too
                self._advance(sequence, draw, step, now)

    def discard(self) -> None:
        """Throw the last scheduled step away, if one is under way; the next `schedule` does it again."""
        if self._step is not None:
            self._kv.undo()
            self._metrics.counters["discarded_steps"] += 1
            self._metrics.counters["wasted_tokens"] += self._step.tokens
            self._step = self._next = self._begun = None

    def take_outputs(self) -> dict[bytes, list[Chunk | Line]]:
        """What happened since the last call, per origin and in its order: a chunk a step for streams, else one at the
        end; and in columns what a step gave to many streams.
        """
        outputs, self._outputs = self._outputs, {}
        return outputs

    def abort_begun(self) -> None:
        """End what has begun under the weights that are served; what waits stays."""
        self.discard()
        for request in [r for r in self._requests if any(s.begun for s in r.live)]:
            self._end_request(request, "abort")

    def enter(self, live: Version, *, recompute: bool) -> None:
        """New weights are final. recompute: what runs computes its KV again from the tokens, else it keeps it. A step
        that was ventured under these very weights stays under way.
        """
        if recompute or self._step is None or self._step.weights != live:
            self.discard()
        self._live = live
        self._batcher.enter(live)
        if recompute:
            self._recompute()

    @property
    def adapters(self) -> Mapping[str, Version]:
        """What sequences begin with now, by name."""
        return self._adapters.by_name

    def adapter_live(self, name: str, adapter: Version, policy: AdapterInFlight) -> None:
        """A version of an adapter is final. What becomes of its sequences that have begun: as of all at an update;
        "finish": they stay with the version that they began with.
        """
        self.discard()
        begun = [r for r in self._requests if r.adapter_name == name and any(s.begun for s in r.live)]
        if policy == "abort":
            for request in begun:
                self._end_request(request, "abort")
        self._adapters.put(name, adapter)
        if policy in ("keep", "recompute", "wait"):
            for request in begun:
                self._batcher.change_adapter(request, adapter, recompute=policy == "recompute")

    def adapter_gone(self, name: str) -> None:
        """An adapter is unloaded: what waits for it ends in an error, what has begun goes on with its version."""
        self.discard()
        self._adapters.remove(name)
        for request in [r for r in self._requests if r.adapter_name == name and not any(s.begun for s in r.live)]:
            self._end_without_adapter(request)

    def abort_adapters(self, epochs: set[int]) -> None:
        """End what computes with these versions of adapters."""
        self.discard()
        for request in [r for r in self._requests if any(s.begun and s.kv.adapter.epoch in epochs for s in r.live)]:
            self._end_request(request, "abort")

    def hold_adapter(self, name: str, on: bool) -> None:
        """Whether nothing of this adapter may begin, for a drain until `adapter_running` is 0."""
        self._adapters.hold(name, on=on)

    def adapter_running(self, name: str) -> int:
        """Sequences of this adapter that have begun and not finished."""
        return sum(sequence.request.adapter_name == name for sequence in self._batcher.begun())

    def adapter_epochs(self) -> set[int]:
        """The adapters that sequences which have begun compute with."""
        return {sequence.kv.adapter.epoch for sequence in self._batcher.begun()} - {0}

    def clear_cache(self, keep_running: bool) -> bool:
        """Forget every cached block; keep_running=False also has what runs computed again, holding nothing.

        Needed with False whenever the engine's KV is gone. True when no sequence holds a block now.
        """
        self.discard()
        if not keep_running:
            self._recompute()
        self._kv.prefix.clear()
        return not self._batcher.running

    def fail_all(self, message: str, *, waiting: bool = True) -> int:
        """End every request (waiting=False: only those that have begun) with finish "error". Returns how many."""
        self.discard()
        chosen = [r for r in self._requests if waiting or any(s.begun for s in r.live)]
        for request in chosen:
            self._end_request(request, "error", message)
        return len(chosen)

    @property
    def running(self) -> int:
        """Sequences that have begun and not finished (what a drain waits for), preempted ones included."""
        return len(self._batcher.running) + sum(s.begun for s in self._batcher.waiting)

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return sum(not s.begun for s in self._batcher.waiting)

    @property
    def idle(self) -> bool:
        """Nothing running and nothing waiting."""
        return not self._requests

    @property
    def blocks_used(self) -> int:
        """KV blocks that sequences hold."""
        return self._kv.pool.used

    @property
    def counters(self) -> dict[str, float]:
        """Monotonic counts, named in `GenerationMetrics`."""
        return dict(self._metrics.counters)

    def drain_samples(self) -> dict[str, list[float]]:
        """Samples since the last call, named in `GenerationMetrics`."""
        return self._metrics.drain_samples()

    def _sequence(
        self, request: Request, index: int, tokens: list[int], kv: KvState, *, sound: bool = True
    ) -> Sequence:
        rules = request.rules
        stream = self._tokenizer.stream(skip_special=False) if rules.strings and self._tokenizer else None
        edits = self._edits(request, tokens[: request.prompt_length] if sound else [], sound=sound)
        sequence = Sequence(request, index, tokens, kv, edits, StopCheck(rules, stream))
        sequence.plain = not (rules.strings or request.speculative)
        request.live.append(sequence)
        return sequence

    def _edits(self, request: Request, prompt: list[int], *, sound: bool = True) -> LogitEdits:
        """Edits of the logits of an output that begins behind `prompt`."""
        rules = request.rules
        stops = frozenset(i for i in rules.eos | rules.ids if 0 <= i < self._spec.vocab_size)
        grammar = request.grammar.matcher(stops) if request.grammar is not None and sound else None
        return LogitEdits(request.sampling, prompt, stops, grammar)

    def _fork(self, leader: Sequence) -> list[Sequence]:
        """All n sequences of a request whose prompt is computed; the new ones share the leader's blocks."""
        request = leader.request
        request.forked = True
        self._metrics.counters["prompt_tokens"] += request.prompt_length
        for index in range(1, request.sampling.n):
            sequence = self._sequence(request, index, list(leader.tokens), self._kv.fork(leader.kv))
            self._batcher.join(sequence)
        return list(request.live)

    def _scores(self, step: Step, logits: Float32 | Logits) -> dict[Sequence, list[Scored] | Draw]:
        """The scores of each sequence that has some in this step, or a Draw that says why it has none."""
        asked: dict[Sequence, Scoring] = {}
        at = len(step.together)
        for row in step.rows:
            if row.scored:
                sequence, request = row.sequence, row.sequence.request
                if request.as_sampled and not request.prompt_logprobs:
                    sequence.edits = self._edits(request, sequence.tokens[: request.score_from])
                first = row.start + row.unscored + 1
                targets = sequence.tokens[first : first + row.scored]
                edits = sequence.edits if request.as_sampled else None
                asked[sequence] = Scoring(at, targets, request.sampling, edits)
            at += row.wanted
        scores = self._scorer.score_all(logits, list(asked.values())) if asked else []
        return dict(zip(asked, scores, strict=True))

    @staticmethod
    def _scored(sequence: Sequence, scores: list[Scored] | Draw) -> Draw | None:
        """Add the scores of a row's tokens to its request's; a Draw says why there are none."""
        if isinstance(scores, Draw):
            return scores
        found = sequence.request.prompt_logprobs
        assert found is not None, "a row is scored because that was asked for"
        found.extend(scores)
        return None

    def _go_on(self, step: Step, drawn: Drawn, now: float) -> None:
        """Give the cohort its tokens. Logits that are not finite end a request: then each is looked at."""
        if not drawn.finite.all():
            sequences = self._cohort.sequences.copy()
            self._cohort.dissolve()
            for sequence, draw in zip(sequences, draws_of(drawn), strict=True):
                if sequence.running:
                    self._kv.advance(sequence.kv, sequence.tokens, 1)
                    self._advance(sequence, draw, step, now)
            return
        ended, lines, turned = self._cohort.advance(drawn, step.weights, now)
        for sequence in turned:
            self._emit(sequence.request, sequence.chunk(self._live))
        for sequence, ending in ended:
            self._end(sequence, *ending)
        for origin, line in lines:
            self._outputs.setdefault(origin, []).append(line)
        if 0 < len(self._cohort) < self._least - 1:  # not as soon as it is one too few: who ends is often followed
            self._cohort.dissolve()

    def _advance(self, sequence: Sequence, draw: Draw, step: Step, now: float) -> None:
        if draw.error:
            self._end_in_error(sequence, draw, step)
            return
        sequence.append(draw, step.weights)
        self._metrics.token(sequence, now)
        ending = sequence.stop.after(draw.token, sequence.length)
        if ending is None and (grammar := sequence.edits.grammar) is not None and grammar.complete:
            ending = ("stop", None)
        if ending is not None:
            self._end(sequence, *ending)
            return
        if sequence.request.stream:
            self._emit(sequence.request, sequence.chunk(self._live))
        if self._may_join(sequence) and (self._step is None or sequence in self._step.together):
            self._cohort.join(sequence, step.weights, now)

    def _may_join(self, sequence: Sequence) -> bool:
        """Whether it may be kept in the cohort; not while a step is under way that has a row of its own for it."""
        if self._batcher.crowded or len(self._batcher.running) < self._least or not self._cohort.takes(sequence):
            return False
        return self._sampler.plain(sequence.request.sampling)

    @staticmethod
    def _not_finite(step: Step, sequence: Sequence) -> str:
        name, version = sequence.request.adapter_name, sequence.request.adapter_version
        adapter = f" and version {version} of adapter {name}" if name else ""
        return f"the logits made by weight version {step.weights.version}{adapter} are not finite (NaN or infinity)"

    def _recompute(self) -> None:
        for sequence in list(self._batcher.running):
            self._metrics.counters["recomputed"] += 1
            self._batcher.send_back(sequence)

    def _end_in_error(self, sequence: Sequence, draw: Draw, step: Step) -> None:
        """End a sequence that has no token or score. draw: says why."""
        sequence.request.fault = "" if draw.broken else "request"
        error = self._not_finite(step, sequence) if draw.broken else draw.error
        self._end_request(sequence.request, "error", error)

    def _end_without_adapter(self, request: Request) -> None:
        request.fault = "adapter"
        self._end_request(request, "error", f"adapter {request.adapter_name!r} is not loaded")

    def _end_request(self, request: Request, reason: FinishReason, error: str = "") -> None:
        """End all its live sequences. The result of one that never forked has the other samples too, empty."""
        for sequence in list(request.live):
            self._end(sequence, reason, error=error)
        if not request.forked:
            request.forked = True
            for index in range(1, request.sampling.n):
                sample = self._sequence(request, index, [0] * request.prompt_length, KvState(), sound=False)
                self._batcher.queue(sample)
                self._end(sample, reason, error=error)

    def _end(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None, error: str = ""
    ) -> None:
        request = sequence.request
        if request.adapter is None:  # it never began: an empty output is of what it would have begun with
            request.adapter = self._adapters.by_name.get(request.adapter_name)
        self._batcher.drop(sequence)
        request.live.remove(sequence)
        if not request.live:
            self._requests.pop(request, None)
        self._metrics.finished(sequence, reason, self._live.version, self._clock())
        self._emit(request, sequence.chunk(request.former or self._live, reason, stop_reason, error))

    def _emit(self, request: Request, chunk: Chunk) -> None:
        self._outputs.setdefault(request.origin, []).append(chunk)
