"""The batch an engine gets for a chosen set of rows."""

from collections.abc import Callable
from typing import Any


def test_a_mixed_batch_lays_rows_end_to_end(rig: Callable[..., Any]) -> None:
    replica = rig(max_tokens=12, prefix_caching=False)
    replica.add("a", [1, 2, 3, 4, 5], max_tokens=9, temperature=0.0)
    replica.step()
    replica.add("b", list(range(10, 30)), max_tokens=9, prompt_logprobs=0)
    replica.step()
    batch = replica.batches[-1]
    first = replica.scheduler._batcher.running[0]
    assert batch.query_lens.tolist() == [1, 11]
    assert batch.context_lens.tolist() == [6, 11]
    assert batch.token_ids.tolist() == [first.tokens[5], *range(10, 21)]
    assert batch.positions.tolist() == [5, *range(11)]
    assert batch.logits_rows.tolist() == list(range(12))  # a decode, and eleven scored positions
    tables = [sequence.kv.table for sequence in replica.scheduler._batcher.running]
    assert batch.block_tables.tolist() == [[*tables[0][:2], 0], tables[1][:3]]
    assert batch.slots.tolist() == [
        tables[0][1] * 4 + 1,
        *(tables[1][at // 4] * 4 + at % 4 for at in range(11)),
    ]
    replica.step()
    batch = replica.batches[-1]
    assert batch.query_lens.tolist() == [1, 9]
    assert batch.logits_rows.tolist() == [
        0,
        *range(1, 10),
    ]  # the last token has no successor to score, but is sampled from


def test_scored_positions_are_few_enough_for_their_logits(rig: Callable[..., Any]) -> None:
    replica = rig(max_tokens=1024, max_model_len=1024, num_blocks=512)
    replica.add("a", [i % 32 for i in range(600)], max_tokens=1, prompt_logprobs=0)
    replica.run()
    assert [int(batch.query_lens.sum()) for batch in replica.batches] == [256, 256, 88]
    assert len(replica.results["a", 0].last.prompt_logprobs) == 599
