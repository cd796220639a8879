"""Scores under the version before the live one: of the very bytes it had, or of none."""

import time

import pytest

from tests.fake_engine import fake_logits
from tests.unit.worker.loop.rig import MODEL
from weight_manager.messages import Rollback, RolledBack
from worker.messages import Clear, Generate, Reload, SamplingParams
from worker.scoring import Scorer

PROMPT, TOKENS = [1, 2, 3], [7, 8, 9, 10, 11, 12]
HOW = SamplingParams(max_tokens=0, prompt_logprobs=0)


@pytest.fixture
def make(make_rig):
    """Serving version 1 after version 0."""

    def made(step_s=0.0):
        rig = make_rig(fake={"step_s": step_s, "kv_weights": False}, max_tokens_per_step=16)
        rig.serve()
        rig.store.push("s1", rig.store.write(1, 1))
        return rig

    return made


def ask(rig, name, version, tokens=TOKENS):
    rig.api.chunks[name] = []
    rig.api.send(Generate(name, PROMPT + tokens, HOW, score_from=len(PROMPT), weight_version=version))


def answer(rig, name):
    rig.api.finish(name)
    return rig.api.chunks[name][-1]


def derived(rig, version, tokens=TOKENS):
    known, scorer, vocab = PROMPT + tokens, Scorer(MODEL["vocab_size"]), MODEL["vocab_size"]
    rows = [fake_logits(rig.store.hashes[version], known[:at], vocab) for at in range(len(PROMPT), len(known))]
    return [scorer.score(row[None], [token], HOW)[0][0][1] for row, token in zip(rows, tokens, strict=True)]


def scores(chunk):
    return [entries[0][1] for entries in chunk.prompt_logprobs]


def test_both_versions_score_beside_each_other(make):
    rig = make()
    rig.api.generate("beside", max_tokens=40)
    for name, version in (("former", 0), ("live", 1)):
        ask(rig, name, version)
    for name, version in (("former", 0), ("live", 1)):
        chunk = answer(rig, name)
        assert chunk.spans[-1].version == version
        assert scores(chunk) == derived(rig, version)
    rig.api.finish("beside")
    rig.check(rig.api, "beside")
    assert rig.api.stats().counters["former_steps"] >= 1


def test_a_push_that_takes_the_slot_in_the_middle_of_a_step_voids_it(make):
    """Bytes change while the step reads them: what it made is not told."""
    rig = make(step_s=0.3)
    ask(rig, "former", 0, TOKENS * 4)
    rig.api.until(lambda: rig.api.stats().running == 1)
    time.sleep(0.05)
    rig.store.write(2, 0)
    chunk = answer(rig, "former")
    assert (chunk.finish, chunk.fault, chunk.prompt_logprobs) == ("error", "version", None)
    ask(rig, "live", 1)
    assert scores(answer(rig, "live")) == derived(rig, 1)


def test_what_was_begun_under_the_live_version_ends_under_it_after_a_push(make):
    rig = make(step_s=0.05)
    tokens = TOKENS * 6
    ask(rig, "score", 1, tokens)
    rig.api.until(lambda: rig.api.stats().running == 1)
    rig.store.push("s2", rig.store.write(2, 0))
    chunk = answer(rig, "score")
    assert chunk.spans[-1].version == 1
    assert scores(chunk) == derived(rig, 1, tokens)


def test_an_undone_commit_leaves_both_versions(make):
    rig = make()
    rig.arena.back(2)  # the spare: the slot of version 0 stays as it is
    live = rig.store.write(2, 2)
    assert rig.store.prepare("s2", live).ok
    assert rig.store.flip("s2").ok
    rig.store.send(Rollback("s2", "test"))
    rig.store.expect(RolledBack)
    for name, version in (("former", 0), ("live", 1)):
        ask(rig, name, version)
        assert scores(answer(rig, name)) == derived(rig, version)


def test_after_a_release_there_is_none(make):
    rig = make()
    rig.api.call(Clear)
    ask(rig, "asleep", 0)
    rig.api.call(Reload)
    chunk = answer(rig, "asleep")
    assert (chunk.finish, chunk.fault) == ("error", "version")
    ask(rig, "live", 1)
    assert scores(answer(rig, "live")) == derived(rig, 1)
