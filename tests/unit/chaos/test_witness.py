"""The witness of a chaos run finds what it is there for: it is shown forged samples beside true ones."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from rollout_client.spans import Span, forward_passes
from tests.chaos import plan, witness
from tests.chaos.clients import PATTERNS, Sample
from tests.chaos.text import text_of
from tests.chaos.trainer import adapted_weights, weights_of
from tests.reference.checkpoint import CONFIG
from tests.reference.llama import Replay

SEED = 3
PROMPT = [5, 17, 99, 3]
SPANS = [Span(4, 0, 6), Span(5, 6, 15)]
TOLD = {
    None: SPANS,
    6: [Span(4, 0, 6), Span(5, 6, 15, recomputed=True)],
    9: [Span(4, 0, 6), Span(5, 6, 9), Span(5, 9, 15, recomputed=True)],
}


def made(recomputed_at: int | None = None) -> Sample:
    """Greedy tokens of two versions; the cache was kept, or computed again before token `recomputed_at`."""
    model = Replay(CONFIG, [weights_of(SEED, span.version) for span in SPANS])
    sample = Sample(list(PROMPT), True, spans=list(TOLD[recomputed_at]), finish="length")
    owner = [0] * len(PROMPT)
    for at in range(SPANS[-1].end):
        mine = 0 if at < SPANS[0].end else 1
        if at == recomputed_at:
            owner = [mine] * len(owner)
        owner[-1] = mine
        row = model.logprobs(PROMPT + sample.tokens, owner)[-1]
        sample.tokens.append(int(row.argmax()))
        sample.logprobs.append(float(row.max()))
        owner.append(mine)
    return sample


@pytest.mark.parametrize("recomputed_at", TOLD)
def test_a_true_sample_is_derived_whatever_became_of_the_cache(recomputed_at):
    assert witness.replay(SEED, made(recomputed_at)) == ""


@pytest.mark.parametrize(("recomputed_at", "said"), [(6, None), (9, None), (None, 6), (None, 9), (9, 6)])
def test_another_history_than_the_spans_tell_is_found(recomputed_at, said):
    assert "is not version 5's" in witness.replay(SEED, replace(made(recomputed_at), spans=TOLD[said]))


@pytest.fixture(scope="module")
def exact():
    return witness.exact_replay(SEED)


@pytest.mark.parametrize("recomputed_at", TOLD)
def test_one_bit_of_a_logprob_is_found(exact, recomputed_at):
    sample = made(recomputed_at)
    passes = forward_passes(sample.spans, len(PROMPT))
    sample.logprobs = exact.logprobs(PROMPT, sample.tokens, passes, 0.0)
    assert witness.replay(SEED, sample) == witness.differing_bits(exact, sample) == ""
    sample.logprobs[7] = float(np.nextafter(sample.logprobs[7], 0))
    assert witness.replay(SEED, sample) == ""
    assert witness.differing_bits(exact, sample).startswith("logprob 7 is -0x")


def test_tokens_under_the_wrong_version_are_found():
    true = made()
    late = replace(true, spans=[Span(4, 0, 7), Span(5, 7, 15)])
    assert "token 6 of 15 is not version 4's" in witness.replay(SEED, late)
    swapped = replace(true, spans=[Span(4, 0, 6), Span(6, 6, 15)])
    assert "token 6 of 15 is not version 6's" in witness.replay(SEED, swapped)


def adapted(name: str, version: int) -> Sample:
    """Greedy tokens of version 4 of the model, with a version of an adapter."""
    model = Replay(CONFIG, [adapted_weights(SEED, 4, name, version)])
    sample = Sample(list(PROMPT), True, finish="length", adapter=name)
    for at in range(6):
        row = model.logprobs(PROMPT + sample.tokens, [0] * (len(PROMPT) + at))[-1]
        sample.tokens.append(int(row.argmax()))
        sample.logprobs.append(float(row.max()))
    sample.spans = [Span(4, 0, 6, adapter_version=version)]
    return sample


@pytest.mark.parametrize("version", [4, 5])
def test_tokens_of_another_version_of_the_adapter_are_found(version):
    true = adapted("policy-a", version)
    assert witness.replay(SEED, true) == ""
    other = replace(true, spans=[Span(4, 0, 6, adapter_version=version + 1)])
    assert f"not version 4's with policy-a {version + 1}" in witness.replay(SEED, other)
    assert "is not version 4's with policy-b" in witness.replay(SEED, replace(true, adapter="policy-b"))
    assert "has another's version" in witness.replay(SEED, replace(true, spans=[Span(4, 0, 6)]))
    assert "has another's version" in witness.replay(SEED, replace(true, adapter=""))


@pytest.mark.parametrize("tp", [1, 2])
def test_one_bit_of_a_logprob_with_an_adapter_is_found(tp):
    sample, exact = adapted("policy-a", 5), witness.exact_replay(SEED, tp)
    passes = forward_passes(sample.spans, len(PROMPT))
    sample.logprobs = exact.logprobs(PROMPT, sample.tokens, passes, 0.0, "policy-a")
    assert witness.replay(SEED, sample) == witness.differing_bits(exact, sample) == ""
    sample.logprobs[3] = float(np.nextafter(sample.logprobs[3], 0))
    assert witness.replay(SEED, sample) == ""
    assert witness.differing_bits(exact, sample).startswith("logprob 3 is -0x")


def held(text: str, finish: str = "length", mask: str = "abcdefghijklmnopqrstuvwxyz .") -> Sample:
    """Tokens of version 4 that were drawn among what a mask leaves."""
    ids = [TOKENS.index(character) for character in mask]
    sample = Sample(list(PROMPT), False, finish=finish, pattern=next(iter(PATTERNS)))
    model = Replay(CONFIG, [weights_of(SEED, 4)])
    for character in text:
        token = TOKENS.index(character)
        row = model.logprobs(PROMPT + sample.tokens, [0] * (len(PROMPT) + len(sample.tokens)))[-1]
        sample.tokens.append(token)
        sample.logprobs.append(float(row[token] - np.logaddexp.reduce(row[ids])))
        sample.masks.append(ids)
    sample.spans = [Span(4, 0, len(text))]
    return sample


TOKENS = [text_of([token]) for token in range(CONFIG["vocab_size"])]


def test_text_that_leaves_its_pattern_is_found():
    assert witness.replay(SEED, held("ab cd ef .", "stop")) == witness.replay(SEED, held("ab c")) == ""
    assert "does not follow" in witness.replay(SEED, held("ab cd .", "stop"))
    assert "does not follow" in witness.replay(SEED, held("ab  c"))
    assert "was not open" in witness.replay(SEED, replace(held("ab"), masks=[[1], [1]]))
    assert "with 1 masks" in witness.replay(SEED, replace(held("ab"), masks=[[66]]))
    other = held("ab c", mask="abcdefghijklmn .")
    assert "token 0 of 4" in witness.replay(SEED, replace(other, masks=held("ab c").masks))


def test_a_forward_pass_over_two_versions_is_found():
    true = made()
    torn = Replay(CONFIG, [mix(weights_of(SEED, 4), weights_of(SEED, 5))])
    row = torn.logprobs(PROMPT + true.tokens[:2], [0] * 6)[-1]
    forged = replace(true, greedy=False, logprobs=[*true.logprobs[:2], float(row[true.tokens[2]]), *true.logprobs[3:]])
    assert "token 2 of 15" in witness.replay(SEED, forged)


def mix(ours, theirs):
    """The first layer of one version, the rest of another."""
    return {name: theirs[name] if ".layers.1." in name else value for name, value in ours.items()}


def test_another_token_or_logprob_is_found():
    true = made()
    other = [*true.tokens[:9], (true.tokens[9] + 1) % 128, *true.tokens[10:]]
    assert "token 9" in witness.replay(SEED, replace(true, tokens=other))
    assert "token 1 " in witness.replay(SEED, replace(true, logprobs=[true.logprobs[0], -9.0, *true.logprobs[2:]]))
    assert "14 logprobs" in witness.replay(SEED, replace(true, logprobs=true.logprobs[1:]))


@pytest.mark.parametrize(
    ("spans", "problem"),
    [
        ([Span(4, 0, 6)], "do not cover"),
        ([Span(4, 0, 5), Span(5, 6, 15)], "do not cover"),
        ([Span(5, 0, 6), Span(4, 6, 15)], "go back"),
        ([Span(4, 0, 6), Span(4, 6, 15)], "begins for nothing"),
    ],
)
def test_spans_that_cannot_be_are_found(spans, problem):
    assert problem in witness.replay(SEED, replace(made(), spans=spans))


def test_versions_are_told_apart(exact):
    sample = made()
    sample.logprobs = exact.logprobs(PROMPT, sample.tokens, forward_passes(sample.spans, len(PROMPT)), 0.0)
    verdict = witness._judge_some(SEED, 1, [sample])
    assert verdict.torn == []
    assert (verdict.tokens, verdict.asked) == (15, 15)
    assert verdict.telling >= 14
    assert np.isfinite(made().logprobs).all()


def test_a_plan_follows_from_its_seed_and_spares_no_process():
    one, again, other = (plan.draw(seed, 600, 4, 2, 2) for seed in (1, 1, 2))
    assert one == again != other
    killed = {fault.target for fault in one + other if fault.what == "kill"}
    assert killed == set(plan.processes(2, 2))
    assert {fault.what for fault in one} == {"kill", "stop", "pause", "clear"}
    assert all(earlier.at <= later.at for earlier, later in pairwise(one))
    for unit in {plan.unit_of(name) for name in plan.processes(2, 2)}:
        times = [fault.at for fault in one if fault.what == "kill" and plan.unit_of(fault.target) == unit]
        assert all(later - earlier > 60 for earlier, later in zip(times, times[plan.KILLS_OF_A_UNIT :], strict=False))
