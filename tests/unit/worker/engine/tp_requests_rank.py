"""One rank of a run that serves random requests; rank 0 prints their tokens and logprobs' bits, and what befell them.

argv: rank, size, sum_parts, seed of how the requests are scheduled, whether they name adapters (0 or 1), then
checkpoint names. What is requested does not depend on that seed: how many at a time, in chunks of what length, from how
many blocks, after which others does. The environment is `rank_sums.met`'s.
"""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.rank_sums import met
from worker.engine.base import ForwardBatch
from worker.messages import Generate, SamplingParams
from worker.scheduler import Scheduler
from worker.versions import Version

spec = importlib.util.spec_from_file_location("engine_conftest", Path(__file__).with_name("conftest.py"))
helpers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)

rank, size, parts, seed, adapted, names = *map(int, sys.argv[1:6]), sys.argv[6:]
signals, sums = met(rank, size)

REQUESTS, BEGINNINGS, EDITS = 24, 3, ({}, {"repetition_penalty": 1.4}, {"logit_bias": {7: 3.0}}, {"top_p": 0.8})


def asked():
    """(prompt, sampling) of each request; prompts share their beginnings."""
    rng = np.random.default_rng(0)
    begins = [rng.integers(0, 96, 40).tolist() for _ in range(BEGINNINGS)]
    for i in range(REQUESTS):
        own = rng.integers(0, 96, int(rng.integers(1, 90))).tolist()
        how = {"max_tokens": int(rng.integers(3, 20)), "temperature": float(rng.choice([0.0, 0.7, 1.0]))}
        yield begins[i % BEGINNINGS] + own, SamplingParams(seed=i, ignore_eos=True, **how, **EDITS[i % len(EDITS)])


def forward(engine, batch):
    """On all ranks."""
    if signals is not None:
        signals.share(batch.pack())
    return engine.forward(batch)


def adapters_of(name, dtype):
    """By name; some change all products, some those of attention alone."""
    if not adapted:
        return {}
    return {path.name: helpers.Adapter(path, dtype) for path in sorted(helpers.ADAPTERS.glob(f"{name}.*"))}


def served(engine, scheduler, requests):
    """The last chunk of each."""
    rng, found, waiting = (
        np.random.default_rng(seed),
        {},
        [requests[i] for i in np.random.default_rng(seed).permutation(len(requests))],
    )
    while waiting or not scheduler.idle:
        for _ in range(int(rng.integers(0, 6))):
            if waiting:
                scheduler.add(b"api", waiting.pop())
        batch = scheduler.schedule(Version(0, 1, ""))
        if batch is not None:
            scheduler.apply(forward(engine, batch))
        for chunk in scheduler.take_outputs().get(b"api", []):
            assert chunk.finish == "length", chunk.error
            found[chunk.request_id] = chunk
    return found


def follow(engine):
    """What the other ranks do until there is no more."""
    while (packed := signals.share(None)) is not None:
        engine.forward(ForwardBatch.unpack(packed))


def lead(engine, adapters):
    """Tokens and logprobs of all requests, which scoring them must give again; and what befell them."""
    names = ["", *adapters]
    rng = np.random.default_rng(seed)
    most = int(rng.choice([17, 40, 64]))
    few = replace(engine.spec, num_blocks=int(rng.integers(34, 50)))
    scheduler = Scheduler(few, None, max_batch=int(rng.integers(4, 17)), max_tokens_per_step=most)
    for epoch, adapter in enumerate(adapters, 1):
        scheduler.adapter_live(adapter, Version(1, epoch, ""), "keep")
    requests = [(*request, names[i % len(names)]) for i, request in enumerate(asked())]
    generate = [Generate(str(i), prompt, how, adapter=name) for i, (prompt, how, name) in enumerate(requests)]
    made = served(engine, scheduler, generate)
    scores = served(
        engine,
        scheduler,
        [
            Generate(
                str(i),
                prompt + made[str(i)].token_ids,
                SamplingParams(
                    max_tokens=0,
                    prompt_logprobs=0,
                    temperature=how.temperature,
                    repetition_penalty=how.repetition_penalty,
                    logit_bias=how.logit_bias,
                ),
                score_from=len(prompt),
                adapter=name,
            )
            for i, (prompt, how, name) in enumerate(requests)
        ],
    )
    answers = [(made[str(i)].token_ids, [p.hex() for p in made[str(i)].logprobs]) for i in range(REQUESTS)]
    scored = [[entries[0][1].hex() for entries in scores[str(i)].prompt_logprobs] for i in range(REQUESTS)]
    assert scored == [logprobs for _, logprobs in answers]
    return answers, {name: scheduler.counters[name] for name in ("preempted", "prefix_hits")} | {"most": most}


told = {}
for name in names:
    for dtype in ("float32", "bfloat16"):
        model = helpers.Checkpoint(helpers.MODELS / name, dtype=dtype, tp=size)
        engine = model.engine(
            rank=rank,
            sums=sums,
            deterministic="on",
            sum_parts=parts,
            max_model_len=256,
            num_blocks=64,
            max_batch=16,
        )
        adapters = adapters_of(name, dtype)
        for epoch, adapter in enumerate(adapters.values(), 1):
            adapter.into(engine, epoch, model, rank)
        if rank == 0:
            told[f"{name} {dtype}"] = lead(engine, adapters)
            if signals is not None:
                signals.share(None)
        else:
            follow(engine)
if rank == 0:
    print(json.dumps(told))
