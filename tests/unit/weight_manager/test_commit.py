import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_manager.commit import Round
from weight_manager.errors import IllegalTransition, PushRefused
from weight_manager.messages import Finalize, Finalized, Flip, Flipped, Live, Prepare, Prepared, Rollback, RolledBack
from weight_manager.votes import Limits, Phase, Tally

LIVE = Live("run", 2, 5, 1, "d" * 16)
LIMITS = Limits(prepare=10.0, flip=2.0, rollback=1.0, finalize=1.0)


def round_of(*voters: int) -> Round:
    round_ = Round("s", LIVE, "keep", set(voters), LIMITS)
    round_.start(0.0)
    return round_


def sent(round_: Round) -> list[tuple[int | str, str]]:
    out = [(number, type(message).__name__) for number, message in round_.outbox]
    round_.outbox.clear()
    return out


def to_flip(*voters: int) -> Round:
    round_ = round_of(*voters)
    for voter in voters:
        round_.prepared(voter, Prepared("s"), 0.1)
    sent(round_)
    return round_


def to_record(*voters: int) -> Round:
    round_ = to_flip(*voters)
    for voter in voters:
        round_.flipped_by(voter, Flipped("s"), 0.2)
    sent(round_)
    return round_


def test_the_good_path():
    round_ = round_of(0, 1)
    assert round_.outbox[0] == (0, Prepare("s", LIVE, "keep", 10.0))
    assert sent(round_) == [(0, "Prepare"), (1, "Prepare")]
    round_.prepared(1, Prepared("s"), 0.1)
    assert sent(round_) == []
    round_.prepared(0, Prepared("s"), 0.1)
    assert sent(round_) == [(0, "Flip"), (1, "Flip")]
    round_.flipped_by(0, Flipped("s"), 0.2)
    assert round_.phase is Phase.FLIP
    round_.flipped_by(1, Flipped("s"), 0.2)
    assert round_.phase is Phase.RECORD
    assert sent(round_) == [], "nobody hears of success before it is written down"
    round_.recorded(0.3)
    assert (sent(round_), round_.flipped) == ([(0, "Finalize"), (1, "Finalize")], 2)
    round_.finalized(0, Finalized("s", 1.0), 0.4)
    round_.finalized(1, Finalized("s", 2.0), 0.4)
    assert (round_.phase, round_.stall_ms) == (Phase.DONE, {"0": 1.0, "1": 2.0})


def test_without_voters_there_is_nothing_to_ask():
    round_ = round_of()
    assert (round_.phase, sent(round_)) == (Phase.RECORD, [])
    round_.recorded(0.1)
    assert (round_.phase, round_.flipped) == (Phase.DONE, 0)


def test_recording_out_of_turn_is_a_bug():
    with pytest.raises(IllegalTransition):
        round_of(0).recorded(0.1)


def test_a_no_names_rank_and_tensor_and_rolls_everybody_back():
    round_ = round_of(0, 1)
    sent(round_)
    round_.prepared(1, Prepared("s", ok=False, rank=3, error="x does not fit", tensors=["x"]), 0.1)
    assert sent(round_) == [(0, "Rollback"), (1, "Rollback")]
    assert round_.refusal is not None
    assert (round_.refusal.code, round_.refusal.rank, round_.refusal.tensors) == ("refused", "replica 1 rank 3", ["x"])
    round_.prepared(0, Prepared("s"), 0.1)  # crossed on the way
    assert sent(round_) == []
    for voter in (0, 1):
        assert round_.phase is Phase.ROLLBACK
        round_.rolled_back(voter, RolledBack("s"), 0.2)
    assert round_.phase is Phase.DONE


def test_silence_in_prepare_and_flip_fails_the_vote_and_unregisters():
    for round_, late in ((round_of(0, 1), 10.0), (to_flip(0, 1), 2.2)):
        if round_.phase is Phase.PREPARE:
            round_.prepared(0, Prepared("s"), 0.1)
        else:
            round_.flipped_by(0, Flipped("s"), 0.1)
        sent(round_)
        round_.tick(late - 0.5)
        assert round_.refusal is None
        round_.tick(late)
        assert round_.refusal is not None
        assert (round_.refusal.code, round_.refusal.rank, round_.lost) == ("deadline", "replica 1", [1])
        assert sent(round_) == [(1, "Rollback"), (0, "Rollback")]
        round_.rolled_back(0, RolledBack("s"), late)
        assert round_.phase is Phase.DONE


def test_silence_in_rollback_is_not_waited_for():
    round_ = to_flip(0, 1)
    round_.flipped_by(0, Flipped("s", ok=False, error="no"), 0.2)
    round_.rolled_back(0, RolledBack("s"), 0.3)
    round_.tick(1.2)
    assert (round_.phase, round_.lost) == (Phase.DONE, [1])


def test_silence_after_the_record_changes_nothing():
    round_ = to_record(0, 1)
    round_.recorded(0.3)
    round_.tick(1.3)
    assert (round_.phase, round_.refusal, round_.lost) == (Phase.DONE, None, [])


@pytest.mark.parametrize("reach", [round_of, to_flip, to_record])
def test_the_dead_leave_the_vote_and_the_last_one_takes_the_version_with_it(reach):
    round_ = reach(0, 1)
    round_.gone(1, "died", 0.2)
    assert round_.refusal is None
    round_.gone(0, "died", 0.2)
    assert round_.refusal is not None
    assert (round_.refusal.code, round_.phase) == ("refused", Phase.DONE)


def test_a_death_completes_a_phase_that_waited_for_it_only():
    round_ = round_of(0, 1)
    round_.prepared(0, Prepared("s"), 0.1)
    sent(round_)
    round_.gone(1, "died", 0.2)
    assert sent(round_) == [(0, "Flip")]


def test_a_failed_record_rolls_back():
    round_ = to_record(0)
    round_.fail(PushRefused("io", "no space"), 0.3)
    assert sent(round_) == [(0, "Rollback")]
    round_.fail(PushRefused("io", "again"), 0.3)
    assert round_.refusal is not None
    assert round_.refusal.message == "no space"


def in_doubt(*voters: int | str) -> Round:
    """Every rank has flipped, and the store above has been told so."""
    round_ = Round("s", LIVE, "keep", set(voters), LIMITS, gated=True)
    round_.start(0.0)
    for step, vote in ((round_.prepared, Prepared("s")), (round_.flipped_by, Flipped("s"))):
        for voter in voters:
            if isinstance(voter, int):
                step(voter, vote, 0.1)
            else:
                round_.store_voted(voter, vote, Tally(1, 1), "", 0.1)
        round_.proceed(2.0, 0.1)
    assert round_.phase is Phase.RECORD
    sent(round_)
    return round_


def test_in_doubt_there_is_no_deadline():
    round_ = in_doubt(0)
    assert round_.deadline == float("inf"), "the loop would turn as fast as it can until the word comes"
    round_.tick(1000.0)
    assert round_.phase is Phase.RECORD


@pytest.mark.parametrize(
    "happens",
    [
        lambda round_: round_.gone(0, "died", 0.2),
        lambda round_: [round_.gone(n, "died", 0.2) for n in (0, 1)],
        lambda round_: round_.gone("b", "has left", 0.2),
        lambda round_: round_.fail(PushRefused("aborted", "by an operator"), 0.2),
    ],
)
def test_in_doubt_nothing_undoes_what_may_be_recorded_above(happens):
    round_ = in_doubt(0, 1, "b")
    happens(round_)
    assert (round_.phase, round_.refusal, sent(round_)) == (Phase.RECORD, None, [])
    round_.recorded(0.3)
    assert {name for _, name in sent(round_)} <= {"Finalize"}


def test_in_doubt_the_word_of_the_store_above_undoes_it():
    round_ = in_doubt(0, "b")
    round_.fail(PushRefused("aborted", "it was not committed above"), 0.2, word=True)
    assert sent(round_) == [(0, "Rollback"), ("b", "Rollback")]


INPUTS = st.tuples(
    st.sampled_from(["prepared", "flipped", "finalized", "rolled_back", "gone", "tick", "fail", "record"]),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from(["s", "other"]),
)


@settings(max_examples=400)
@given(st.integers(0, 3), st.lists(INPUTS, max_size=40))
def test_no_order_of_events_breaks_all_or_nothing(voters, inputs):
    """Whatever arrives: Finalize and Rollback never both, Flip only after every vote, an end within the deadlines."""
    now, recorded = 0.0, False
    round_ = round_of(*range(voters))
    seen: list[tuple[int, object]] = []
    prepared: set[int] = set()
    for what, number, ok, session in inputs:
        now += 0.7
        match what:
            case "prepared":
                waits = round_.phase is Phase.PREPARE and session == "s" and ok
                prepared |= {number} if waits else set()
                round_.prepared(number, Prepared(session, ok=ok), now)
            case "flipped":
                round_.flipped_by(number, Flipped(session, ok=ok), now)
            case "finalized":
                round_.finalized(number, Finalized(session, 1.0), now)
            case "rolled_back":
                round_.rolled_back(number, RolledBack(session), now)
            case "gone":
                round_.gone(number, "died", now)
            case "tick":
                round_.tick(now)
            case "fail":
                round_.fail(PushRefused("aborted", "x"), now)
            case "record" if round_.phase is Phase.RECORD:
                round_.recorded(now)
                recorded = True
        seen += round_.outbox
        round_.outbox.clear()
    kinds = {type(message) for _, message in seen}
    assert not {Finalize, Rollback} <= kinds
    assert (Finalize in kinds) <= recorded
    assert recorded == (round_.refusal is None and round_.phase in (Phase.FINALIZE, Phase.DONE))
    flipped = {number for number, message in seen if isinstance(message, Flip)}
    assert flipped <= prepared
    for _ in range(3):
        now += 10.1
        round_.tick(now)
    if round_.phase is Phase.RECORD:
        round_.recorded(now)
        round_.tick(now + 1.1)
    assert round_.phase is Phase.DONE
