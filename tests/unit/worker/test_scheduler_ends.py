"""What the scheduler promises about how requests end and what they are told, one promise a test."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from tests.unit.worker.conftest import digest_of
from worker.engine.base import EngineSpec
from worker.messages import Chunk, Generate, SamplingParams, Span
from worker.scheduler import Scheduler
from worker.tokenizer import Tokenizer
from worker.versions import Version

MakeRig = Callable[..., Any]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def test_abort_takes_exact_ids_and_gives_back_what_there_is(rig: MakeRig) -> None:
    replica = rig()
    for name in ("a", "ab"):
        replica.add(name, PROMPT, n=2, max_tokens=9, seed=4)
    for _ in range(3):
        replica.step()
    assert replica.scheduler.abort(["a", "nobody"]) == 1
    assert replica.scheduler.abort(["a"]) == 0
    replica.run()
    for index in range(2):
        assert (replica.results["a", index].finish, len(replica.results["a", index].tokens)) == ("abort", 3)
        assert replica.results["ab", index].finish == "length"
        replica.check_replay("a", index)


def test_a_request_that_leaves_no_token_open_is_at_fault_itself(rig: MakeRig) -> None:
    replica = rig()
    replica.add("a", PROMPT, max_tokens=3, allowed_token_ids=[5], stop_token_ids=[5], min_tokens=2)
    replica.run()
    assert (replica.results["a", 0].finish, replica.results["a", 0].last.error) == ("error", "every token is masked")
    assert replica.results["a", 0].last.fault == "request"


def test_what_comes_between_schedule_and_apply_throws_the_step_away(rig: MakeRig) -> None:
    for upset in (
        lambda scheduler: scheduler.abort(None),
        lambda scheduler: scheduler.fail_all("broken"),
        lambda scheduler: scheduler.enter(Version(1, 101, digest_of(1)), recompute=True),
        lambda scheduler: scheduler.clear_cache(keep_running=False),
    ):
        replica = rig()
        replica.add("a", PROMPT, n=3, max_tokens=5)
        replica.step()
        assert len(replica.schedule().block_copies) == 2
        upset(replica.scheduler)
        replica.check_blocks()
        assert replica.scheduler.blocks_used == 0
        replica.run()
        assert replica.scheduler.counters["discarded_steps"] == 1


def test_abort_before_anything_ran_answers_for_every_sample(rig: MakeRig) -> None:
    replica = rig()
    replica.update("keep", 6)
    replica.add("a", PROMPT, n=3, max_tokens=9)
    assert replica.scheduler.abort(None) == 1
    replica.collect()
    assert [replica.results["a", i].last for i in range(3)] == [
        Chunk("a", i, [], [], [Span(6, 0, 0, digest=digest_of(6))], finish="abort") for i in range(3)
    ]
    assert replica.scheduler.idle


def test_nothing_to_generate_still_names_the_version(rig: MakeRig) -> None:
    replica = rig()
    replica.bind(3)
    replica.add("none", PROMPT, max_tokens=0, n=2)
    replica.add("full", list(range(30)) + list(range(30)) + [1, 2, 3, 4])
    assert not replica.step(admit=False)
    assert not replica.results
    replica.step()
    for key in (("none", 0), ("none", 1), ("full", 0)):
        assert (replica.results[key].finish, replica.results[key].spans) == ("length", [Span(3, 0, 0)])
    assert replica.scheduler.idle


def test_scoring_a_prompt_without_generating(rig: MakeRig) -> None:
    replica = rig(max_tokens=32)
    replica.add("warm", PROMPT, max_tokens=1)
    replica.run()
    replica.add("score", PROMPT, max_tokens=0, prompt_logprobs=2, temperature=1.0)
    replica.add("beside", [7, *PROMPT], max_tokens=4, temperature=0.0)
    replica.run()
    replica.check_replay("beside")
    scores = replica.results["score", 0].last.prompt_logprobs
    assert len(scores) == len(PROMPT) - 1
    for at, entries in enumerate(scores, 1):
        token, logprob, rank = entries[0]
        assert token == PROMPT[at]
        replica.sent["score"] = Generate("score", [1], SamplingParams(temperature=1.0, logprobs=2))
        draw = replica.expected("score", 0, PROMPT[:at], replica.logits(PROMPT[:at], [0] * at))
        assert [(i, pytest.approx(p, abs=1e-5)) for i, p in draw.top if i != token] == [
            (i, p) for i, p, _ in entries[1:]
        ]
        assert rank >= 1
        assert logprob <= 0
    assert replica.results["score", 0].tokens == []


@pytest.mark.parametrize("upset", ["recompute", "discard", "preempt"])
def test_scores_are_whole_whatever_interrupts_them(rig: MakeRig, upset: str) -> None:
    replica = rig(max_tokens=8, max_batch=1)
    replica.add("a", list(range(20)), max_tokens=2, prompt_logprobs=0, priority=1, n=2)
    replica.step()
    if upset == "recompute":
        replica.update("recompute", 1)
    elif upset == "discard":
        replica.schedule()
        replica.scheduler.discard()
    else:
        replica.add("urgent", PROMPT, max_tokens=1)
    replica.run()
    first, second = (replica.results["a", index] for index in range(2))
    assert [entries[0][0] for entries in first.last.prompt_logprobs] == list(range(1, 20))
    assert second.last.prompt_logprobs is None
    assert len(first.tokens) == len(second.tokens) == 2


@pytest.mark.parametrize(("row", "lengths"), [(0, [1, 1]), (1, [2, 1])])
def test_logits_that_are_not_finite_end_their_request_only(rig: MakeRig, row: int, lengths: list[int]) -> None:
    replica = rig()
    replica.bind(7)
    replica.add("bad", PROMPT, n=2, max_tokens=6, seed=1, stream=True)
    replica.add("good", PROMPT[:5], max_tokens=6, seed=1)
    replica.step()
    logits = replica.engine.forward(replica.schedule())
    logits[row, 3] = np.nan
    replica.scheduler.apply(logits)
    replica.run()
    for index in range(2):
        result = replica.results["bad", index]
        assert (result.finish, len(result.tokens)) == ("error", lengths[index])
        assert "weight version 7 are not finite" in result.last.error
        assert not result.last.fault
    assert replica.results["good", 0].finish == "length"
    replica.check_replay("good")
    assert replica.scheduler.counters["finished_error"] == 2


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, "empty"),
        ([1] * 65, {}, "65 tokens"),
        ([32], {}, "[0, 32)"),
        ([-1], {}, "[0, 32)"),
        ([1], {"logit_bias": {32: 1.0}}, "[0, 32)"),
        ([1], {"allowed_token_ids": [40]}, "[0, 32)"),
        ([1], {"stop": ["x"]}, "tokenizer"),
        ([1], {"allowed_token_ids": []}, "masked"),
    ],
)
def test_impossible_requests_end_with_an_error(
    rig: MakeRig, prompt: list[int], fields: dict[str, Any], message: str
) -> None:
    replica = rig()
    replica.add("a", prompt, n=2, **fields)
    replica.run()
    for index in range(2):
        assert replica.results["a", index].finish == "error"
        assert message in replica.results["a", index].last.error
        assert replica.results["a", index].last.fault == "request"


def test_the_context_ends_a_sequence_with_length(rig: MakeRig) -> None:
    replica = rig(num_blocks=5, max_model_len=64)  # five blocks of four: less than the model allows
    replica.add("a", PROMPT, n=2, temperature=0.0)
    replica.run()
    for index in range(2):
        assert (replica.results["a", index].finish, len(replica.results["a", index].tokens)) == ("length", 11)
        replica.check_replay("a", index)


def test_eos_ends_with_its_id_in_the_tokens(rig: MakeRig) -> None:
    probe = rig()
    probe.add("a", PROMPT, temperature=0.0, max_tokens=6)
    probe.run()
    eos = probe.results["a", 0].tokens[3]
    for fields, expected in (
        ({}, ("stop", None, 4)),
        ({"stop_token_ids": [eos]}, ("stop", eos, 4)),
        ({"ignore_eos": True}, ("length", None, 6)),
        ({"max_tokens": 4}, ("stop", None, 4)),
    ):
        replica = rig(eos=(eos,))
        replica.add("a", PROMPT, **{"temperature": 0.0, "max_tokens": 6, **fields})
        replica.run()
        result = replica.results["a", 0]
        assert (result.finish, result.last.stop_reason, len(result.tokens)) == expected
    replica = rig(eos=(eos,))
    replica.add("a", PROMPT, temperature=0.0, max_tokens=20, min_tokens=12)
    replica.run()
    assert eos not in replica.results["a", 0].tokens[:12]


def test_stop_strings_span_tokens_of_each_sample_alone(rig: MakeRig) -> None:
    letters = tokenizers.Tokenizer(models.WordLevel({chr(97 + i): i for i in range(26)}, unk_token="a"))
    letters.decoder = decoders.Fuse()
    tokenizer = Tokenizer(letters, {}, {}, ())
    probe = rig(vocab_size=26)
    probe.add("a", PROMPT, n=2, seed=9, max_tokens=12, temperature=3.0)
    probe.run()
    free = [probe.results["a", index].tokens for index in range(2)]
    stop = tokenizer.decode(free[0][4:7])
    assert stop not in tokenizer.decode(free[1])
    replica = rig(vocab_size=26, tokenizer=tokenizer)
    replica.add("a", PROMPT, n=2, seed=9, max_tokens=12, temperature=3.0, stop=["zzzz", stop])
    replica.run()
    first, second = (replica.results["a", index] for index in range(2))
    assert (first.tokens, first.finish, first.last.stop_reason) == (free[0][:7], "stop", stop)
    assert (second.tokens, second.finish) == (free[1], "length")


def test_clear_cache_forgets_and_says_whether_blocks_are_held(rig: MakeRig) -> None:
    replica = rig()
    replica.add("a", PROMPT, max_tokens=8, temperature=0.0)
    replica.step()
    assert not replica.scheduler.clear_cache(keep_running=True)
    replica.add("b", PROMPT, max_tokens=1)
    replica.step()
    assert replica.results["b", 0].last.cached_tokens == 0
    assert replica.scheduler.clear_cache(keep_running=False)
    assert replica.scheduler.blocks_used == 0
    replica.engine.release_kv()
    replica.engine.allocate_kv()
    replica.run()
    replica.check_replay("a")


def test_fail_all_ends_what_runs_or_everything(rig: MakeRig) -> None:
    replica = rig(max_batch=1)
    for name in "abc":
        replica.add(name, PROMPT, max_tokens=8)
    replica.step()
    replica.schedule()
    assert replica.scheduler.fail_all("the engine broke", waiting=False) == 1
    replica.collect()
    assert replica.results["a", 0].last.error == "the engine broke"
    assert replica.scheduler.waiting == 2
    assert replica.scheduler.fail_all("going down") == 2
    replica.collect()
    assert replica.scheduler.idle
    replica.check_blocks()


def test_chunks_are_plain_json(rig: MakeRig) -> None:
    import msgspec

    replica = rig()
    replica.add("a", PROMPT, max_tokens=3, logprobs=3, prompt_logprobs=1, top_k=4, sampling_mask=True)
    replica.run()
    chunk = replica.results["a", 0].last
    document = json.loads(msgspec.json.encode(chunk))
    assert msgspec.convert(document, Chunk) == chunk
    assert [len(top) for top in chunk.top] == [3, 3, 3]
    assert [len(mask) for mask in chunk.masks] == [4, 4, 4]
    assert len(chunk.ranks) == 3


def test_times_are_sampled_once() -> None:
    now = [0.0]
    spec = EngineSpec(8, 64, 4, 16, ())
    scheduler = Scheduler(spec, None, max_batch=4, max_tokens_per_step=8, clock=lambda: now[0])
    scheduler.add(b"", Generate("a", [1, 2], SamplingParams(max_tokens=3)))
    for at in (1.0, 3.0, 6.0):
        now[0] = at
        assert scheduler.schedule(Version(0, 0, "")) is not None
        now[0] = at + 0.5
        scheduler.apply(np.zeros((1, 8), np.float32))
    samples = scheduler.drain_samples()
    assert samples == {"queue_s": [1.0], "ttft_s": [1.5], "itl_s": [2.0, 3.0], "e2e_s": [6.5], "staleness": [0.0]}
    assert not any(scheduler.drain_samples().values())
    assert scheduler.counters["generation_tokens"] == 3
    assert scheduler.counters["prompt_tokens"] == 2


def test_a_budget_below_the_seats_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_tokens_per_step \(3\)"):
        Scheduler(EngineSpec(8, 64, 4, 16, ()), None, max_batch=4, max_tokens_per_step=3)
