"""What a step gave to many streams leaves as one message, which says whose the columns are when that changes."""

from collections.abc import Callable
from typing import Any

from worker import messages
from worker.messages import Chunk, Chunks, Tokens
from worker.sequence import Line, Telling


def _decoding(rig: Callable[..., Any], many: int) -> Any:
    replica = rig(max_batch=many, max_tokens=2048, num_blocks=4 * many, block_size=16)
    for number in range(many):
        replica.add(f"r{number}", [1, 2], max_tokens=9 + number % 2, seed=number, stream=True)
    replica.step()
    return replica


def _told(replica: Any, telling: Telling) -> tuple[list[Chunk | Line], list[Chunks | Tokens]]:
    batch = replica.schedule()
    replica.scheduler.apply(replica.engine.forward(batch))
    items = replica.scheduler.take_outputs()[b"api"]
    sent = [messages.decode_to_api(messages.encode(message)) for message in telling.messages(b"api", items)]
    assert all(isinstance(message, Chunks | Tokens) for message in sent)
    return items, sent


def test_members_are_named_when_they_change(rig: Callable[..., Any]) -> None:
    replica, telling = _decoding(rig, 4), Telling()
    named = []
    for _ in range(9):
        items, sent = _told(replica, telling)
        lines = [item for item in items if isinstance(item, Line)]
        tokens = [message for message in sent if isinstance(message, Tokens)]
        assert [message.drawn() for message in tokens] == [
            (tuple(line.tokens.tolist()), tuple(line.logprobs.tolist())) for line in lines
        ]
        named += [message.members for message in tokens]
    everyone = [(f"r{number}", 0) for number in range(4)]
    assert named[:2] == [everyone, None]
    assert [members for members in named if members is not None][1:] == [[("r3", 0), ("r1", 0)]]  # r0 and r2 ended


def test_a_connection_that_comes_again_is_told_everything(rig: Callable[..., Any]) -> None:
    replica, telling = _decoding(rig, 3), Telling()
    _told(replica, telling)
    telling.forget(b"api")
    _, (message,) = _told(replica, telling)
    assert isinstance(message, Tokens)
    assert message.members == [("r0", 0), ("r1", 0), ("r2", 0)]


def test_chunks_and_columns_leave_in_the_order_in_which_they_happened(rig: Callable[..., Any]) -> None:
    replica, telling = _decoding(rig, 3), Telling()
    chunk = Chunk("x", 0, [1], [-1.0], [messages.Span(0, 0, 1)])
    items, _ = _told(replica, telling)
    sent = list(telling.messages(b"api", [chunk, chunk, *items, chunk]))
    assert [type(message) for message in sent] == [Chunks, Tokens, Chunks]
    assert [len(message.items) for message in sent if isinstance(message, Chunks)] == [2, 1]


def test_a_step_of_many_is_a_small_message(rig: Callable[..., Any]) -> None:
    replica, telling = _decoding(rig, 256), Telling()
    _told(replica, telling)
    batch = replica.schedule()
    replica.scheduler.apply(replica.engine.forward(batch))
    (message,) = telling.messages(b"api", replica.scheduler.take_outputs()[b"api"])
    assert len(messages.encode(message)) < 256 * 12 + 64
