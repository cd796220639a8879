"""What the scheduler promises, one promise a test."""

from collections.abc import Callable
from typing import Any

from tests.unit.worker.conftest import digest_of
from worker.messages import Chunk, Generate, SamplingParams, Span

MakeRig = Callable[..., Any]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def test_a_request_runs_to_its_length_in_one_chunk(rig: MakeRig) -> None:
    replica = rig()
    replica.add("a", PROMPT, temperature=0.0, max_tokens=5)
    replica.run()
    result = replica.results["a", 0]
    assert len(result.chunks) == 1
    assert (result.finish, result.last.stop_reason, len(result.tokens)) == ("length", None, 5)
    assert result.spans == [Span(0, 0, 5)]
    replica.check_replay("a")


def test_a_stream_has_a_chunk_a_step_and_origins_are_apart(rig: MakeRig) -> None:
    replica = rig()
    sampling = SamplingParams(max_tokens=3, temperature=0.0)
    replica.scheduler.add(b"one", Generate("a", PROMPT, sampling, stream=True))
    replica.scheduler.add(b"two", Generate("b", PROMPT, sampling))
    seen: list[tuple[bytes, Chunk]] = []
    while not replica.scheduler.idle:
        replica.scheduler.apply(replica.engine.forward(replica.schedule()))
        for origin, chunks in replica.scheduler.take_outputs().items():
            seen += [(origin, chunk) for chunk in chunks if isinstance(chunk, Chunk)]
    one = [chunk for origin, chunk in seen if origin == b"one"]
    two = [chunk for origin, chunk in seen if origin == b"two"]
    assert [len(chunk.token_ids) for chunk in one] == [1, 1, 1]
    assert [chunk.finish for chunk in one] == [None, None, "length"]
    assert one[1].spans == [Span(0, 0, 2, digest=digest_of(0))]
    assert [chunk.request_id for chunk in two] == ["b"]
    assert len(two[0].token_ids) == 3


def test_samples_share_one_prefill_and_copy_what_they_write(rig: MakeRig) -> None:
    replica = rig(num_blocks=64)
    replica.add("a", PROMPT, n=4, max_tokens=6, seed=3, temperature=2.0)
    replica.step()
    assert sum(int(batch.query_lens.sum()) for batch in replica.batches) == len(PROMPT)
    assert replica.scheduler.blocks_used == 3
    replica.step()
    assert len(replica.batches[-1].block_copies) == 3  # the last writer keeps the original
    replica.run()
    assert {index for _, index in replica.results} == {0, 1, 2, 3}
    assert len({tuple(result.tokens) for result in replica.results.values()}) == 4
    for index in range(4):
        replica.check_replay("a", index)


def test_more_samples_than_seats_take_turns(rig: MakeRig) -> None:
    replica = rig(max_batch=3, max_tokens=12)
    replica.add("a", PROMPT, n=7, max_tokens=4, seed=3)
    replica.run()
    assert len(replica.results) == 7
    assert max(len(batch.query_lens) for batch in replica.batches) == 3
    for index in range(7):
        replica.check_replay("a", index)


def test_a_long_prompt_does_not_stall_a_decode(rig: MakeRig) -> None:
    replica = rig(max_tokens=8)
    replica.add("decode", PROMPT[:3], max_tokens=30, stream=True, temperature=0.0)
    replica.step()
    replica.add("long", list(range(30)), max_tokens=1)
    for _ in range(4):
        before = len(replica.results["decode", 0].tokens)
        replica.step()
        assert len(replica.results["decode", 0].tokens) == before + 1
        assert replica.batches[-1].query_lens.sum() <= 8
    assert replica.batches[-1].query_lens.tolist() == [1, 7]


def test_same_seed_same_tokens_whatever_else_is_in_the_batch(rig: MakeRig) -> None:
    def tokens(crowd: int, **sizes: Any) -> list[list[int]]:
        replica = rig(**sizes)
        for i in range(crowd):
            replica.add(f"crowd{i}", [i, *PROMPT], max_tokens=9 + i, seed=i)
        replica.add("a", PROMPT, n=2, max_tokens=12, seed=2**70 + 1, temperature=1.5, top_p=0.9)
        replica.run()
        return [replica.results["a", index].tokens for index in range(2)]

    alone = tokens(0)
    assert tokens(5) == alone
    assert tokens(3, num_blocks=11, max_model_len=44) == alone  # preempted on the way
    assert alone[0] != alone[1]


def test_without_a_seed_every_request_is_its_own(rig: MakeRig) -> None:
    replica = rig()
    for name in "ab":
        replica.add(name, PROMPT, max_tokens=12, temperature=2.0)
    replica.run()
    assert replica.results["a", 0].tokens != replica.results["b", 0].tokens


def test_preemption_gives_way_to_the_first_and_is_counted(rig: MakeRig) -> None:
    replica = rig(num_blocks=10, max_model_len=40)
    for name in ("first", "second", "third"):
        replica.add(name, [*PROMPT, ord(name[0]) % 32], max_tokens=20, temperature=0.0)
    finished: list[str] = []
    for _ in range(200):
        if replica.scheduler.idle:
            break
        replica.step()
        finished += [key[0] for key, result in replica.results.items() if result.finish and key[0] not in finished]
    assert finished == ["first", "second", "third"]
    assert replica.scheduler.counters["preempted"] > 0
    assert replica.scheduler.counters["wasted_tokens"] > 0
    for name in finished:
        replica.check_replay(name)


def test_a_lower_priority_number_displaces_what_runs(rig: MakeRig) -> None:
    replica = rig(max_batch=2, max_tokens=16)
    for name in ("slow1", "slow2"):
        replica.add(name, PROMPT, max_tokens=20, priority=5)
    replica.step()
    replica.step()
    replica.add("urgent", PROMPT, max_tokens=2, priority=1, seed=0)
    replica.add("later", PROMPT, max_tokens=2, priority=5)
    for _ in range(3):
        replica.step()
    assert {key[0] for key in replica.results} == {"urgent"}
    replica.run()
    replica.check_replay("urgent")


def test_a_cached_prompt_is_not_computed_again_and_still_gives_its_logits(rig: MakeRig) -> None:
    replica = rig()
    prompt = PROMPT[:8]  # two whole blocks
    replica.add("a", prompt, max_tokens=3, temperature=0.0)
    replica.run()
    replica.batches.clear()
    replica.add("b", prompt, max_tokens=3, temperature=0.0)
    replica.run()
    assert replica.batches[0].query_lens.tolist() == [4]
    assert replica.results["b", 0].last.cached_tokens == 4
    assert replica.results["a", 0].tokens == replica.results["b", 0].tokens
    assert replica.scheduler.counters["prefix_hits"] == 4
    assert replica.scheduler.counters["prefix_queries"] == 16


def test_equal_prompts_that_arrive_together_are_prefilled_once(rig: MakeRig) -> None:
    replica = rig(max_tokens=64)
    for i in range(4):
        replica.add(str(i), [*PROMPT, 0, 0, 0, i], max_tokens=2, temperature=0.0)
    replica.step()
    replica.step()
    assert [batch.query_lens.tolist() for batch in replica.batches] == [[13], [1, 1, 1, 1]]
    replica.run()
    for i in range(4):
        replica.check_replay(str(i))


def test_a_prompt_that_is_computed_in_part_begins_anew_under_new_weights(rig: MakeRig) -> None:
    replica = rig(max_tokens=8)
    replica.add("a", PROMPT * 3, temperature=0.0, max_tokens=3)
    replica.step()
    assert not replica.results
    replica.update("keep", 1)
    replica.run()
    assert replica.results["a", 0].spans == [Span(1, 0, 3)]
    replica.check_replay("a")  # cells of other weights would change the logits


def test_a_prompt_from_the_cache_begins_anew_when_its_step_was_thrown_away(rig: MakeRig) -> None:
    replica = rig()
    replica.add("a", PROMPT, temperature=0.0, max_tokens=2)
    replica.run()
    replica.add("b", PROMPT, temperature=0.0, max_tokens=3, n=2)
    assert replica.schedule() is not None
    assert replica.scheduler.blocks_used
    replica.scheduler.discard()
    replica.bind(1)  # as a reload or a missed commit does: no word of an update comes before the next step
    replica.run()
    assert [replica.results["b", index].spans for index in (0, 1)] == [[Span(1, 0, 3)]] * 2
    replica.check_replay("b")


def test_a_prompt_whose_logprobs_are_wanted_is_scored_under_one_version(rig: MakeRig) -> None:
    replica, alone = rig(max_tokens=8), rig(max_tokens=8)
    for one in (replica, alone):
        one.add("a", PROMPT * 3, temperature=0.0, max_tokens=1, prompt_logprobs=0)
    replica.step()
    replica.update("keep", 1)
    alone.update("keep", 1)
    replica.run()
    alone.run()
    assert replica.results["a", 0].chunks[0].prompt_logprobs == alone.results["a", 0].chunks[0].prompt_logprobs


def test_a_salt_keeps_prefixes_apart(rig: MakeRig) -> None:
    replica = rig()
    for name, salt in (("a", ""), ("b", "tenant"), ("c", "tenant")):
        replica.add(name, PROMPT, max_tokens=1, cache_salt=salt)
        replica.run()
    assert [replica.results[name, 0].last.cached_tokens for name in "abc"] == [0, 0, 8]
