"""Steps launched before the tokens of the one before are known: when, and what comes of them."""

from collections import Counter
from typing import Any

import pytest

from tests.unit.worker.conftest import Ahead, digest_of
from tests.unit.worker.letters import END, VOCAB, letters
from tests.unit.worker.test_grammar import regex
from worker.grammar import Matcher
from worker.versions import Version


def test_steady_decoding_flies_and_gives_the_same_tokens(rig):
    requests = [([1, 2, 3], 9, 4), ([4, 5], 14, 1), ([6], 5, 2)]
    played = []
    for device in (False, True):
        replica = rig(device=device, num_blocks=64)
        for number, (prompt, tokens, seed) in enumerate(requests):
            replica.add(str(number), prompt, max_tokens=tokens, temperature=1.0, seed=seed)
        replica.run()
        played.append(replica)
    host, device = played
    assert {key: r.tokens for key, r in host.results.items()} == {key: r.tokens for key, r in device.results.items()}
    for number in range(3):
        device.check_replay(str(number))
    assert device.flights >= 11  # all but the prompts' step and the first behind it
    assert len(device.batches) <= 3


def test_a_token_too_many_is_dropped(rig):
    plain = rig()
    plain.add("a", [1, 2, 3], max_tokens=12, temperature=0.0)
    plain.run()
    stop = plain.results["a", 0].tokens[5]
    first = plain.results["a", 0].tokens.index(stop)
    replica = rig(device=True)
    replica.add("a", [1, 2, 3], max_tokens=12, temperature=0.0, stop_token_ids=[stop])
    replica.add("b", [1, 2, 3, 4], max_tokens=12, temperature=0.0)
    replica.run()
    assert replica.results["a", 0].tokens == plain.results["a", 0].tokens[: first + 1]
    assert replica.results["a", 0].finish == "stop"
    assert len(replica.results["b", 0].tokens) == 12
    replica.check_replay("b")


def test_whoever_waits_is_let_in_after_the_step_that_is_on_its_way(rig):
    replica = rig(device=True, max_batch=2)
    replica.add("a", [1, 2], max_tokens=30, temperature=1.0, seed=1)
    for _ in range(5):
        replica.step()
    assert replica.flight is not None
    replica.add("b", [3, 4], max_tokens=3, temperature=1.0, seed=2)
    replica.step()  # takes what was on its way, and launches nothing behind it
    assert replica.flight is None
    replica.step()
    assert replica.results.get(("b", 0)) is None
    replica.run()
    for name in "ab":
        replica.check_replay(name)


def test_a_step_whose_sequences_have_all_ended_is_taken_in_and_the_next_begins(rig):
    plain = rig()
    plain.add("a", [1, 2, 3], max_tokens=12, temperature=0.0)
    plain.run()
    stop = plain.results["a", 0].tokens[5]
    replica = rig(device=True)
    replica.add("a", [1, 2, 3], max_tokens=12, temperature=0.0, stop_token_ids=[stop])
    while replica.results.get(("a", 0)) is None or not replica.results["a", 0].finish:
        replica.step()
    assert replica.flight is not None, "launched before its last token was known"
    replica.add("b", [4, 5], max_tokens=4, temperature=0.0)
    replica.run()
    assert len(replica.results["b", 0].tokens) == 4
    replica.check_replay("b")


KINDS = {
    "penalties": {"repetition_penalty": 1.7, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {3: 2.0, 9: -4.0}, "top_p": 0.8},
    "allowed": {"allowed_token_ids": [1, 2, 3, 5, 8], "temperature": 0.7},
    "bad words": {"bad_words": [[4], [5, 6], [1, 2]]},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": [2, 3, 4, 5, 6, 7]},
    "top logprobs": {"logprobs": 3},
    "more than are open": {"logprobs": 9, "allowed_token_ids": [1, 2, 3]},
    "named logprobs": {"logprob_token_ids": [5, 1, 5, 30], "allowed_token_ids": [1, 2, 5]},
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
    "stop string": {"stop": ["ab", "5"]},
    "mask of a cut": {"sampling_mask": True, "top_k": 4, "repetition_penalty": 1.2},
    "mask of a grammar": {"sampling_mask": True, "grammar": regex("(ab|cd|[0-9])*")},
    "mask of one": {"sampling_mask": True, "temperature": 0.0},
    "mask of nothing closed": {"sampling_mask": True, "allowed_token_ids": [1, 2, 3]},
    "grammar": {"grammar": regex("(ab|cd)*")},
    "grammar that is over": {"grammar": regex("[a-f]{5}"), "ignore_eos": True},
    "all at once": {
        "grammar": regex("[a-f]{9}"),
        "repetition_penalty": 1.4,
        "logit_bias": {2: 1.0},
        "logprobs": 4,
        "top_k": 3,
    },
}


def play(rig: Any, kinds: dict[str, Any], *, device: bool, mode: str = "processed", **sizes: Any) -> Any:
    sizes = {"num_blocks": 64, "max_tokens": 40} | sizes
    replica = rig(device=device, tokenizer=letters(), vocab_size=VOCAB, eos=(END,), logprobs_mode=mode, **sizes)
    for number, (name, fields) in enumerate(kinds.items()):
        asked = {"temperature": 1.0, "max_tokens": 12, "seed": number, "stream": number % 2 == 0} | fields
        replica.add(name, [1 + number, 2, 3], **asked)
    replica.run()
    return replica


@pytest.mark.parametrize("mode", ["processed", "raw"])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_asked_of_tokens_flies_and_is_what_the_host_says(rig: Any, kind: str, mode: str) -> None:
    host, device = (play(rig, {kind: KINDS[kind]}, device=there, mode=mode) for there in (False, True))
    assert told(device) == told(host)
    tokens = len(device.results[kind, 0].tokens)
    assert device.flights >= min(tokens, 7) - 2, "all but the prompt's step, and those in which it may join the cohort"


@pytest.mark.parametrize("sizes", [{"max_batch": 16}, {"max_batch": 16, "num_blocks": 22}, {"max_batch": 5}])
def test_all_kinds_together_and_plain_ones_beside_them(rig: Any, sizes: dict[str, Any]) -> None:
    kinds = {**KINDS, "plain": {}, "plain and long": {"max_tokens": 30}, "of three": {"n": 3, "frequency_penalty": 0.5}}
    host, device = (play(rig, kinds, device=there, **sizes) for there in (False, True))
    assert told(device) == told(host)
    assert device.flights > 3


def test_a_grammar_that_cannot_be_followed_ends_its_request_and_nobody_elses(rig: Any, monkeypatch: Any) -> None:
    bits, record, failing = Matcher.bits, Matcher.record, "the grammar takes too much time"
    seen: Counter[Matcher] = Counter()
    monkeypatch.setattr(Matcher, "record", lambda self, token: (record(self, token), seen.update([self])))
    monkeypatch.setattr(Matcher, "bits", lambda self: failing if seen[self] == 4 else bits(self))
    kinds = {"grammar": KINDS["grammar"], "beside it": {"repetition_penalty": 1.3}}
    host, device = (play(rig, kinds, device=there) for there in (False, True))
    assert told(device) == told(host)
    assert device.results["grammar", 0].last.error == failing
    assert len(device.results["grammar", 0].tokens) == 4
    assert device.flights > 6


def test_what_needs_the_host_no_more_is_kept_in_arrays_from_then_on(rig: Any) -> None:
    replica = rig(device=True)
    replica.add("a", [1, 2], max_tokens=20, temperature=1.0, seed=1, min_tokens=5, stop_token_ids=[3])
    kept = []
    while replica.step():
        kept.append(len(replica.scheduler._cohort))
    assert kept[:5] == [0] * 5
    assert 1 in kept[5:8], "the step in which it may join is not launched ahead"
    replica.check_replay("a")


def test_what_a_device_cannot_report_is_drawn_by_the_host_one_step_after_the_other(rig: Any) -> None:
    kinds = {"many": {"logprobs": 1025}, "beside it": {"repetition_penalty": 1.3}}
    host, device = (play(rig, kinds, device=there) for there in (False, True))
    assert told(device) == told(host)
    assert device.flights <= 1, "the one beside it, once the other has ended"


def test_prompts_are_scored_where_the_logits_are(rig: Any) -> None:
    kinds: dict[str, Any] = {
        "own": {"prompt_logprobs": 0},
        "likeliest": {"prompt_logprobs": 3, "temperature": 0.6},
        "an output": {"prompt_logprobs": 1, "score_from": 2, "max_tokens": 0},
        "an edited output": {"prompt_logprobs": 1, "score_from": 1, "max_tokens": 0, "repetition_penalty": 1.8},
    }
    host, device = (play(rig, kinds, device=there) for there in (False, True))
    assert told(device) == told(host)
    assert all(device.results[kind, 0].chunks[0].prompt_logprobs for kind in kinds)


def told(replica: Any) -> Any:
    return {key: result.chunks for key, result in replica.results.items()}


def test_flown_steps_survive_updates_aborts_and_want_of_blocks(rig: Any) -> None:
    """Under every policy, while all kinds decode; what follows is what the spans claim."""
    kinds = {name: fields for name, fields in KINDS.items() if name != "stop string"}
    for policy in ("keep", "recompute", "wait"):
        replica = rig(device=True, tokenizer=letters(), vocab_size=VOCAB, eos=(END,), max_tokens=40, num_blocks=26)
        for number, (name, fields) in enumerate(kinds.items()):
            replica.add(name, [1 + number, 2], **({"temperature": 1.0, "max_tokens": 14, "seed": number} | fields))
        for turn in range(9):
            replica.step()
            if turn in (3, 6):
                replica.update(policy, turn)
            if turn == 5:
                assert replica.scheduler.abort(["bias"])
        replica.run()
        for name in kinds:
            replica.check_replay(name)
        assert replica.flights > 2


def test_broken_logits_end_one_sequence_and_leave_the_others_rows_alone(rig):
    replica = rig(device=True)
    replica.add("a", [1, 2], max_tokens=9, temperature=1.0, seed=1)
    replica.add("b", [3, 4], max_tokens=9, temperature=1.0, seed=2)
    for _ in range(4):
        replica.step()
    replica.flight.rows[0] = float("nan")
    replica.run()
    assert replica.results["a", 0].finish == "error"
    assert len(replica.results["b", 0].tokens) == 9
    replica.check_replay("b")


@pytest.mark.parametrize("stream", [False, True])
def test_a_commit_in_between_changes_the_version_and_nothing_else(rig, stream):
    """The step behind it is launched of all rows at once, and others behind that, as if nothing had been."""
    played = []
    for device in (False, True):
        replica = rig(device=device, kv_weights=True)
        for number in range(4):
            replica.add(str(number), [1 + number, 2], max_tokens=40, temperature=1.0, seed=number, stream=stream)
        for _ in range(9 if device else 10):  # what is on its way at the commit comes of the version before
            replica.step()
        assert len(replica.scheduler._cohort) == 4
        changes, steps, flights = replica.scheduler._cohort.changes, len(replica.batches), replica.flights
        replica.update("keep", 7)
        for _ in range(5):
            replica.step()
        assert replica.scheduler._cohort.changes == changes, "nobody has left"
        if device:
            assert (len(replica.batches) - steps, replica.flights - flights) == (1, 4)
        replica.run()
        for number in range(4):
            replica.check_replay(str(number))
            spans = replica.results[str(number), 0].last.spans
            assert [span.version for span in spans] == [0, 7]
        played.append({key: (r.tokens, r.last.spans) for key, r in replica.results.items()})
    assert played[0] == played[1]


def test_a_step_of_weights_that_become_live_stays_under_way_and_one_of_others_does_not(rig):
    replica = rig(device=True)
    replica.add("a", [1, 2], max_tokens=20, temperature=1.0, seed=1)
    for _ in range(4):
        replica.step()
    replica.bind(3)  # flipped: what was on its way is taken in
    batch = replica.scheduler.venture(replica.live)
    logits = Ahead(replica.engine, replica.forward(batch))
    replica.scheduler.enter(replica.live, recompute=False)
    assert replica.scheduler.launched_ahead
    replica.flight = logits
    replica.step()
    replica.run()
    replica.check_replay("a")
    assert [span.version for span in replica.results["a", 0].last.spans] == [0, 3]

    replica.add("b", [1, 2], max_tokens=20, temperature=1.0, seed=1)
    for _ in range(4):
        replica.step()
    replica.take_in()
    replica.scheduler.venture(Version(9, replica.live.epoch + 1, digest_of(9)))
    replica.scheduler.enter(replica.live, recompute=False)  # rolled back
    assert not replica.scheduler.launched_ahead
    replica.run()
    replica.check_replay("b")
    assert [span.version for span in replica.results["b", 0].last.spans] == [3]


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_all_kinds_are_ventured_and_go_on_under_the_version_that_is_live(rig: Any, policy: str) -> None:
    kinds = {name: fields for name, fields in KINDS.items() if "grammar" not in fields} | {"plain": {}}
    replica = rig(device=True, tokenizer=letters(), vocab_size=VOCAB, eos=(END,), max_batch=16, max_tokens=64)
    for number, (name, fields) in enumerate(kinds.items()):
        replica.add(name, [1 + number, 2], **({"temperature": 1.0, "max_tokens": 14, "seed": number} | fields))
    for _ in range(4):
        replica.step()
    replica.bind(3)
    running = replica.scheduler.running
    batch = replica.scheduler.venture(replica.live)
    assert len(batch.token_ids) == running > 5
    logits = Ahead(replica.engine, replica.forward(batch))
    replica.scheduler.enter(replica.live, recompute=policy == "recompute")
    assert replica.scheduler.launched_ahead == (policy == "keep")
    replica.flight = logits
    replica.run()
    for name in kinds:
        replica.check_replay(name)


def test_nothing_is_ventured_but_a_token_for_each_that_runs(rig):
    replica = rig(device=True)
    assert replica.scheduler.venture(Version(1, 200, digest_of(1))) is None, "nobody runs"
    replica.add("a", list(range(1, 20)), max_tokens=20, temperature=1.0, seed=1)
    replica.step()
    assert replica.scheduler.venture(Version(1, 200, digest_of(1))) is None, "a prompt is computed of one version"
    for _ in range(3):
        replica.step()
    replica.take_in()
    replica.add("b", [3, 4], max_tokens=3, temperature=1.0, seed=2)
    batch = replica.scheduler.venture(Version(1, 200, digest_of(1)))
    assert len(batch.token_ids) == 1, "whoever waits begins under weights that are live"
    replica.scheduler.discard()
    replica.run()
    for name in "ab":
        replica.check_replay(name)


@pytest.mark.parametrize(("policy", "versions"), [("keep", [1, 2]), ("recompute", [1, 2]), ("finish", [1])])
def test_an_adapter_changes_between_steps_that_are_launched_ahead(rig: Any, policy: str, versions: list[int]) -> None:
    """What is on its way is of the version before, and what follows it of the one that its policy says."""
    replica = rig(device=True, num_blocks=128)
    replica.adapter("a", 1)
    replica.adapter("b", 1)
    for number, adapter in enumerate(("", "a", "b", "a")):
        replica.add(str(number), [1 + number, 2], max_tokens=30, temperature=1.0, seed=number, adapter=adapter)
    for _ in range(6):
        replica.step()
    assert replica.flight is not None
    flights = replica.flights
    replica.adapter("a", 2, policy)
    replica.run()
    assert replica.flights > flights + 15
    for number, expected in enumerate(([None], versions, [1], versions)):
        replica.check_replay(str(number))
        assert [span.adapter_version for span in replica.results[str(number), 0].last.spans] == expected
