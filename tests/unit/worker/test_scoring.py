"""Given tokens are scored with the logprobs that they were sampled with, wherever their prompt's keys come from."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.unit.worker.conftest import digest_of
from worker.messages import SamplingParams
from worker.scoring import Scorer

MakeRig = Callable[..., Any]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def sampled(replica: Any, count: int = 12, **fields: Any) -> tuple[list[int], list[float]]:
    replica.add("sampled", PROMPT, max_tokens=count, seed=7, **fields)
    replica.run()
    result = replica.results["sampled", 0]
    return result.tokens, result.logprobs


def score(replica: Any, tokens: list[int], name: str = "score", **fields: Any) -> list[float]:
    fields = {"max_tokens": 0, "prompt_logprobs": 0, "score_from": len(PROMPT)} | fields
    replica.add(name, PROMPT + tokens, **fields)
    replica.run()
    last = replica.results[name, 0].last
    assert [entries[0][0] for entries in last.prompt_logprobs or ()] == tokens
    return [entries[0][1] for entries in last.prompt_logprobs or ()]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("mode", ["processed", "raw"])
@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.8}, {"logprobs": 3}])
def test_scores_are_the_logprobs_of_sampling(rig: MakeRig, temperature: float, mode: str, cut: dict[str, Any]) -> None:
    replica = rig(logprobs_mode=mode)
    tokens, logprobs = sampled(replica, temperature=temperature, **cut)
    assert score(replica, tokens, temperature=temperature) == logprobs


EDITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"presence_penalty": 0.9, "frequency_penalty": 0.4},
    {"logit_bias": {3: 4.0, 7: -5.0}},
    {"allowed_token_ids": [1, 2, 3, 9, 17]},
    {"bad_words": [[4], [5, 6]]},
    {"min_tokens": 6, "stop_token_ids": [1, 2, 3, 4], "logit_bias": dict.fromkeys((1, 2, 3, 4), 9.0)},
    {"repetition_penalty": 1.3, "logit_bias": {2: 3.0}, "top_p": 0.9, "logprobs": 2},
]


@pytest.mark.parametrize("mode", ["processed", "raw"])
@pytest.mark.parametrize("edits", EDITS, ids=lambda edits: next(iter(edits)))
def test_scores_are_of_the_edited_logits_that_were_sampled_from(rig: MakeRig, mode: str, edits: dict[str, Any]) -> None:
    replica = rig(logprobs_mode=mode)
    for temperature in (0.0, 0.7):
        name = f"at {temperature}"
        replica.add(name, PROMPT, max_tokens=12, seed=7, temperature=temperature, **edits)
        replica.run()
        result = replica.results[name, 0]
        found = score(replica, result.tokens, f"score {name}", temperature=temperature, **edits)
        assert found == result.logprobs
        plain = score(replica, result.tokens, f"plain {name}", temperature=temperature)
        assert (plain == result.logprobs) == (mode == "raw")


def test_edits_are_those_of_the_first_token_after_an_interruption(rig: MakeRig) -> None:
    """What was scored before it must not count twice."""
    replica = rig(max_tokens=4, max_batch=4)
    edits = {"repetition_penalty": 2.0, "frequency_penalty": 1.0}
    tokens, logprobs = sampled(replica, 12, **edits)
    replica.add("score", PROMPT + tokens, max_tokens=0, prompt_logprobs=0, score_from=len(PROMPT), **edits)
    for _ in range(3):
        replica.step()
    request = next(iter(replica.scheduler._requests))
    assert request.prompt_logprobs, "some are known"
    replica.update("recompute", 0)
    replica.run()
    found = replica.results["score", 0].last.prompt_logprobs
    assert [entries[0][1] for entries in found or ()] == logprobs


def test_edits_of_a_prompt_that_is_continued_do_not_touch_its_logprobs(rig: MakeRig) -> None:
    """As other servers have it: prompt_logprobs are the model's."""
    replica = rig()
    for name, edits in (("plain", {}), ("edited", {"logit_bias": {3: 9.0}, "repetition_penalty": 1.5})):
        replica.add(name, PROMPT, max_tokens=2, prompt_logprobs=0, **edits)
    replica.run()
    plain, edited = (replica.results[name, 0].chunks[0].prompt_logprobs for name in ("plain", "edited"))
    assert plain == edited


def test_the_prompt_comes_from_the_cache_and_what_is_scored_does_not(rig: MakeRig) -> None:
    replica = rig()
    tokens, logprobs = sampled(replica)
    assert score(replica, tokens) == logprobs
    cached = replica.results["score", 0].last.cached_tokens
    assert cached == (len(PROMPT) - 1) // 4 * 4
    assert score(rig(prefix_caching=False), tokens) == logprobs


def test_logits_are_asked_for_of_scored_tokens_alone(rig: MakeRig) -> None:
    replica = rig(prefix_caching=False, max_tokens=4, max_batch=4)
    tokens, logprobs = sampled(replica, 9)
    replica.batches.clear()
    assert score(replica, tokens) == logprobs
    assert sum(len(batch.logits_rows) for batch in replica.batches) == len(tokens)


@pytest.mark.parametrize("upset", ["recompute", "discard", "preempt"])
def test_scores_are_whole_whatever_interrupts_them(rig: MakeRig, upset: str) -> None:
    replica = rig(max_tokens=4, max_batch=1)
    tokens, logprobs = sampled(replica, 10)
    replica.add("score", PROMPT + tokens, max_tokens=0, prompt_logprobs=0, score_from=len(PROMPT), priority=1)
    replica.step()
    assert ("score", 0) not in replica.results
    if upset == "recompute":
        replica.update("recompute", 0)
    elif upset == "discard":
        replica.schedule()
        replica.scheduler.discard()
    else:
        replica.add("urgent", [1, 2, 3], max_tokens=1)
    replica.run()
    found = replica.results["score", 0].last.prompt_logprobs
    assert [entries[0][:2] for entries in found or ()] == list(zip(tokens, logprobs, strict=True))


def test_scores_of_an_update_in_between_are_of_the_new_version(rig: MakeRig) -> None:
    replica, fresh = rig(max_tokens=4, max_batch=4), rig(max_tokens=4, max_batch=4)
    tokens, before = sampled(replica, 10)
    replica.add("score", PROMPT + tokens, max_tokens=0, prompt_logprobs=0, score_from=len(PROMPT))
    replica.step()
    replica.update("keep", 1)
    replica.run()
    fresh.bind(1)
    assert replica.results["score", 0].spans[0].version == 1
    found = [entries[0][1] for entries in replica.results["score", 0].last.prompt_logprobs or ()]
    assert found == score(fresh, tokens)
    assert found != before


def pinned(replica: Any, name: str, tokens: list[int], version: int | None, **fields: Any) -> None:
    fields = {"max_tokens": 0, "prompt_logprobs": 0, "score_from": len(PROMPT), "weight_version": version} | fields
    replica.add(name, PROMPT + tokens, **fields)


def told(replica: Any, name: str) -> tuple[list[float], int]:
    last = replica.results[name, 0].last
    assert last.finish == "length", last.error
    return [entries[0][1] for entries in last.prompt_logprobs or ()], last.spans[-1].version


def test_the_version_before_the_live_one_scores_what_it_sampled(rig: MakeRig) -> None:
    """Among sequences of the live one, which do not see it; its prompt's keys are its own."""
    replica, alone = rig(max_batch=4), rig(max_batch=4)
    tokens, before = sampled(replica)
    for one in (replica, alone):
        one.update("keep", 1)
        for i in range(3):
            one.add(f"live{i}", PROMPT, max_tokens=9, seed=i)
        one.step()
    pinned(replica, "former", tokens, 0)
    pinned(replica, "live", tokens, 1)
    for one in (replica, alone):
        one.run()
    assert told(replica, "former") == (before, 0)
    scored, version = told(replica, "live")
    assert version == 1
    assert scored != before
    for i in range(3):
        assert replica.results[f"live{i}", 0].tokens == alone.results[f"live{i}", 0].tokens
        replica.check_replay(f"live{i}")
    assert any(batch.former for batch in replica.batches)


def test_they_take_turns(rig: MakeRig) -> None:
    replica = rig(max_tokens=8, max_batch=4, max_model_len=128, num_blocks=128, prefix_caching=False)
    tokens, _ = sampled(replica, 60)
    replica.update("keep", 1)
    for i in range(3):
        pinned(replica, f"former{i}", tokens, 0)
        replica.add(f"live{i}", PROMPT, max_tokens=30, seed=i)
    replica.batches.clear()
    replica.run()
    kinds = [batch.former for batch in replica.batches]
    assert kinds[:20] == [True, False] * 10 or kinds[:20] == [False, True] * 10


def test_samples_of_one_prompt_share_its_keys_under_the_former_version(rig: MakeRig) -> None:
    replica = rig()
    tokens, before = sampled(replica)
    replica.update("keep", 1)
    for name in ("first", "second"):
        pinned(replica, name, tokens, 0)
        replica.run()
        assert told(replica, name) == (before, 0)
    assert replica.results["first", 0].last.cached_tokens == 0, "keys of another version"
    assert replica.results["second", 0].last.cached_tokens == (len(PROMPT) - 1) // 4 * 4


@pytest.mark.parametrize("begun", [False, True])
def test_what_is_pinned_to_the_live_version_goes_on_under_it_when_another_comes(rig: MakeRig, begun: bool) -> None:
    replica = rig(max_tokens=4, max_batch=4)
    tokens, before = sampled(replica, 10)
    pinned(replica, "score", tokens, 0)
    for _ in range(2 * begun):
        replica.step()
    replica.update("keep", 1)
    replica.run()
    assert told(replica, "score") == (before, 0)


@pytest.mark.parametrize("begun", [False, True])
def test_a_push_that_takes_its_slot_ends_it_with_a_word(rig: MakeRig, begun: bool) -> None:
    replica = rig(max_tokens=4, max_batch=4)
    tokens, _ = sampled(replica, 10)
    replica.update("keep", 1)
    pinned(replica, "score", tokens, 0)
    for _ in range(2 * begun):
        replica.step()
    replica.former = None
    replica.run()
    last = replica.results["score", 0].last
    assert (last.finish, last.fault, last.prompt_logprobs) == ("error", "version", None)
    assert last.error == "weight version 0 is not here: 1 is live, and the one before it is held no more"


def test_a_step_of_bytes_that_were_given_away_meanwhile_counts_for_nothing(rig: MakeRig) -> None:
    replica = rig(max_tokens=4, max_batch=4)
    tokens, _ = sampled(replica, 10)
    replica.update("keep", 1)
    pinned(replica, "score", tokens, 0)
    assert replica.schedule().former
    assert replica.scheduler.under_former
    replica.scheduler.discard()
    replica.former = None
    replica.run()
    assert replica.results["score", 0].last.fault == "version"


@pytest.mark.parametrize("number", [None, 7])
def test_a_digest_says_which_weights_of_a_number_score(rig: MakeRig, number: int | None) -> None:
    replica = rig()
    replica.update("keep", 7, content=70)
    tokens, before = sampled(replica)
    replica.update("keep", 7, content=71)  # forced
    pinned(replica, "by number", tokens, 7)
    for content in (70, 71, 72):
        pinned(replica, str(content), tokens, number, weight_digest=digest_of(content))
    replica.run()
    live, old, new, gone = (replica.results[name, 0].last for name in ("by number", "70", "71", "72"))
    assert [chunk.spans[-1].digest for chunk in (live, old, new)] == [digest_of(content) for content in (71, 70, 71)]
    assert told(replica, "70") == (before, 7)
    assert told(replica, "71") == told(replica, "by number") != (before, 7)
    assert (gone.finish, gone.fault) == ("error", "version")
    assert f"of digest {digest_of(72)} is not here: 7 is live" in gone.error


def test_two_versions_back_is_gone(rig: MakeRig) -> None:
    replica = rig()
    tokens, _ = sampled(replica)
    for version in (1, 2):
        replica.update("keep", version)
    pinned(replica, "score", tokens, 0)
    replica.run()
    assert replica.results["score", 0].last.error == "weight version 0 is not here: 2 is live, and 1 was before it"


def test_the_former_version_gives_way_and_gets_its_turn_again(rig: MakeRig) -> None:
    """Few blocks: earlier and more urgent requests of the live version come first, nothing is lost."""
    replica = rig(num_blocks=12, max_tokens=8, max_batch=4)
    tokens, before = sampled(replica, 12)
    replica.update("keep", 1)
    for i in range(4):
        replica.add(f"live{i}", PROMPT, max_tokens=20, seed=i, priority=i % 2)
        pinned(replica, f"former{i}", tokens, 0, priority=(i + 1) % 2)
    replica.run()
    for i in range(4):
        assert told(replica, f"former{i}") == (before, 0)
        replica.check_replay(f"live{i}")


def test_a_rollback_swaps_them(rig: MakeRig) -> None:
    replica = rig(max_tokens=4, max_batch=4)
    tokens, before = sampled(replica, 10)
    replica.update("keep", 1)
    pinned(replica, "score", tokens, 0)
    replica.step()
    replica.update("keep", 0)
    pinned(replica, "other", tokens, 1)
    replica.run()
    assert told(replica, "score") == (before, 0)
    assert told(replica, "other")[1] == 1


def test_an_adapter_over_the_former_version_scores_what_it_sampled(rig: MakeRig) -> None:
    replica = rig()
    replica.adapter("a", 0)
    tokens, before = sampled(replica, adapter="a")
    replica.update("keep", 1)
    for name, adapter in (("adapted", "a"), ("base", "")):
        pinned(replica, name, tokens, 0, adapter=adapter)
    replica.run()
    assert told(replica, "adapted") == (before, 0)
    assert told(replica, "base")[0] != before
    assert replica.results["adapted", 0].spans[-1].adapter_version == 0


@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"repetition_penalty": 1.5}])
def test_what_drafts_had_a_part_in_has_the_scores_it_was_sampled_with(rig: MakeRig, how: dict[str, Any]) -> None:
    replica = rig(speculative=True, max_tokens=16, max_batch=8)
    tokens, logprobs = sampled(replica, **how)
    assert score(replica, tokens, **how) == logprobs
    replica.update("keep", 1)
    pinned(replica, "former", tokens, 0, **how)
    replica.run()
    assert told(replica, "former") == (logprobs, 0)


@pytest.mark.parametrize("seed", range(25))
def test_any_mixture_of_requests_updates_and_pushes_scores_the_version_it_names_or_none(
    rig: MakeRig, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    replica = rig(num_blocks=int(rng.integers(16, 40)), max_tokens=int(rng.choice([6, 16])), max_batch=5)
    wanted: dict[str, int] = {}
    for number in range(60):
        name = f"{number}"
        tokens = rng.integers(0, 32, int(rng.integers(1, 20))).tolist()
        match rng.choice(
            ["score", "generate", "step", "update", "push", "abort"], p=[0.3, 0.15, 0.35, 0.1, 0.05, 0.05]
        ):
            case "score":
                wanted[name] = max(0, replica.live.version - int(rng.integers(0, 3)))
                pinned(replica, name, tokens, wanted[name], priority=int(rng.integers(2)))
            case "generate":
                replica.add(name, tokens, max_tokens=int(rng.integers(1, 20)), seed=number, stream=True)
            case "step":
                for _ in range(int(rng.integers(1, 8))):
                    replica.step()
            case "update":
                replica.update(str(rng.choice(["keep", "recompute", "abort"])), replica.live.version + 1)
            case "push":
                replica.former = None
            case "abort":
                replica.scheduler.abort({str(int(rng.integers(number + 1)))})
                replica.collect()
    replica.run()
    scorer, how = Scorer(32), SamplingParams(prompt_logprobs=0)
    for name, version in wanted.items():
        last = replica.results[name, 0].last
        if last.finish == "length":
            known, at = replica.sent[name].prompt_ids, len(PROMPT)
            rows = np.stack([replica.logits(known[:i], [version] * i) for i in range(at, len(known))])
            assert last.prompt_logprobs == scorer.score(rows, known[at:], how)
            assert last.spans[-1].version == version
        else:
            assert (last.finish, last.fault) in (("error", "version"), ("abort", ""))
    for name in replica.sent.keys() - wanted.keys():
        if replica.results[name, 0].last.finish == "length":
            replica.check_replay(name)
