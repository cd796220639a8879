from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_manager.ballot import Ballot, Limits, Tally
from weight_manager.errors import IllegalTransition, PushRefused
from weight_manager.life import Event, Life, Role, State
from weight_manager.messages import Finalize, Finalized, Flip, Flipped, Live, Prepare, Prepared, Rollback, RolledBack

LIVE = Live("run", 2, 5, 1, "d" * 16)
LIMITS = Limits(prepare=10.0, flip=2.0, rollback=1.0, finalize=1.0)


def ballot_of(*voters: int | str, role: Role = Role.ROOT, **more: Any) -> Ballot:
    life = Life(role)
    life.fire(Event.SENT)
    life.fire(Event.WHOLE)
    ballot = Ballot(life, "s", LIVE, "keep", set(voters), LIMITS, **more)
    ballot.prepare(Event.PREPARE if role is Role.RELAY else Event.COMMIT, 0.0)
    return ballot


def sent(ballot: Ballot) -> list[tuple[int | str, str]]:
    out = [(number, type(message).__name__) for number, message in ballot.outbox]
    ballot.outbox.clear()
    return out


def to_flip(*voters: int) -> Ballot:
    ballot = ballot_of(*voters)
    for voter in voters:
        ballot.prepared(voter, Prepared("s"), 0.1)
    sent(ballot)
    return ballot


def to_record(*voters: int) -> Ballot:
    ballot = to_flip(*voters)
    for voter in voters:
        ballot.flipped_by(voter, Flipped("s"), 0.2)
    sent(ballot)
    return ballot


def test_the_good_path():
    ballot = ballot_of(0, 1)
    assert ballot.outbox[0] == (0, Prepare("s", LIVE, "keep", 10.0))
    assert sent(ballot) == [(0, "Prepare"), (1, "Prepare")]
    ballot.prepared(1, Prepared("s"), 0.1)
    assert sent(ballot) == []
    ballot.prepared(0, Prepared("s"), 0.1)
    assert sent(ballot) == [(0, "Flip"), (1, "Flip")]
    ballot.flipped_by(0, Flipped("s"), 0.2)
    assert ballot.life.state is State.FLIPPING
    ballot.flipped_by(1, Flipped("s"), 0.2)
    assert ballot.life.state is State.FLIPPED
    assert sent(ballot) == [], "nobody hears of success before it is written down"
    ballot.recorded(0.3)
    assert (sent(ballot), ballot.flipped) == ([(0, "Finalize"), (1, "Finalize")], 2)
    ballot.finalized(0, Finalized("s", 1.0), 0.4)
    ballot.finalized(1, Finalized("s", 2.0), 0.4)
    assert (ballot.life.state, ballot.stall_ms) == (State.OVER, {"0": 1.0, "1": 2.0})


def test_without_voters_there_is_nothing_to_ask():
    ballot = ballot_of()
    assert (ballot.life.state, sent(ballot)) == (State.FLIPPED, [])
    ballot.recorded(0.1)
    assert (ballot.life.state, ballot.flipped) == (State.OVER, 0)


def test_recording_out_of_turn_is_a_bug():
    with pytest.raises(IllegalTransition):
        ballot_of(0).recorded(0.1)


def test_a_no_names_rank_and_tensor_and_rolls_everybody_back():
    ballot = ballot_of(0, 1)
    sent(ballot)
    ballot.prepared(1, Prepared("s", ok=False, rank=3, error="x does not fit", tensors=["x"]), 0.1)
    assert sent(ballot) == [(0, "Rollback"), (1, "Rollback")]
    assert ballot.refusal is not None
    assert (ballot.refusal.code, ballot.refusal.rank, ballot.refusal.tensors) == ("refused", "replica 1 rank 3", ["x"])
    ballot.prepared(0, Prepared("s"), 0.1)  # crossed on the way
    assert sent(ballot) == []
    for voter in (0, 1):
        assert ballot.life.state is State.UNDOING
        ballot.rolled_back(voter, RolledBack("s"), 0.2)
    assert ballot.life.state is State.OVER


def test_silence_in_prepare_and_flip_fails_the_vote_and_unregisters():
    for ballot, late in ((ballot_of(0, 1), 10.0), (to_flip(0, 1), 2.2)):
        if ballot.life.state is State.PREPARING:
            ballot.prepared(0, Prepared("s"), 0.1)
        else:
            ballot.flipped_by(0, Flipped("s"), 0.1)
        sent(ballot)
        ballot.tick(late - 0.5)
        assert ballot.refusal is None
        ballot.tick(late)
        assert ballot.refusal is not None
        assert (ballot.refusal.code, ballot.refusal.rank, ballot.lost) == ("deadline", "replica 1", [1])
        asked = "prepare within 10 s" if late == 10.0 else "flip within 2 s"
        assert ballot.refusal.message == f"replica 1 did not answer to {asked}"
        assert sent(ballot) == [(1, "Rollback"), (0, "Rollback")]
        ballot.rolled_back(0, RolledBack("s"), late)
        assert ballot.life.state is State.OVER


def test_silence_in_rollback_is_not_waited_for():
    ballot = to_flip(0, 1)
    ballot.flipped_by(0, Flipped("s", ok=False, error="no"), 0.2)
    ballot.rolled_back(0, RolledBack("s"), 0.3)
    ballot.tick(1.2)
    assert (ballot.life.state, ballot.lost) == (State.OVER, [1])


def test_silence_after_the_record_changes_nothing():
    ballot = to_record(0, 1)
    ballot.recorded(0.3)
    ballot.tick(1.3)
    assert (ballot.life.state, ballot.refusal, ballot.lost) == (State.OVER, None, [])


@pytest.mark.parametrize("reach", [ballot_of, to_flip, to_record])
def test_the_dead_leave_the_vote_and_the_last_one_takes_the_version_with_it(reach):
    ballot = reach(0, 1)
    ballot.gone(1, "died", 0.2)
    assert ballot.refusal is None
    ballot.gone(0, "died", 0.2)
    assert ballot.refusal is not None
    assert (ballot.refusal.code, ballot.life.state) == ("refused", State.OVER)


def test_a_death_completes_a_phase_that_waited_for_it_only():
    ballot = ballot_of(0, 1)
    ballot.prepared(0, Prepared("s"), 0.1)
    sent(ballot)
    ballot.gone(1, "died", 0.2)
    assert sent(ballot) == [(0, "Flip")]


def test_a_failed_record_rolls_back():
    ballot = to_record(0)
    ballot.undo(Event.REFUSED, PushRefused("io", "no space"), 0.3)
    assert sent(ballot) == [(0, "Rollback")]
    ballot.undo(Event.REFUSED, PushRefused("io", "again"), 0.3)
    assert ballot.refusal is not None
    assert ballot.refusal.message == "no space"


def in_doubt(*voters: int | str, **more: Any) -> Ballot:
    """Every rank has flipped, and the store above has been told so."""
    ballot = ballot_of(*voters, role=Role.RELAY, **more)
    for step, vote in ((ballot.prepared, Prepared("s")), (ballot.flipped_by, Flipped("s"))):
        for voter in voters:
            if isinstance(voter, int):
                step(voter, vote, 0.1)
            else:
                ballot.store_voted(voter, vote, Tally(1, 1), "", 0.1)
        ballot.flip(2.0, 0.1)
    ballot.life.fire(Event.NOTED)
    sent(ballot)
    return ballot


def test_in_doubt_there_is_no_deadline():
    ballot = in_doubt(0)
    assert ballot.deadline == float("inf"), "the loop would turn as fast as it can until the word comes"
    ballot.tick(1000.0)
    assert ballot.life.state is State.DOUBT


@pytest.mark.parametrize(
    "happens",
    [
        lambda ballot: ballot.gone(0, "died", 0.2),
        lambda ballot: [ballot.gone(n, "died", 0.2) for n in (0, 1)],
        lambda ballot: ballot.gone("b", "has left", 0.2),
        *(
            lambda ballot, event=event: ballot.undo(event, PushRefused("aborted", event.value), 0.2)
            for event in (Event.REFUSED, Event.OPERATOR_ABORTS, Event.ABOVE_LOST, Event.UNWRITTEN, Event.LATE)
        ),
    ],
)
def test_in_doubt_nothing_undoes_what_may_be_recorded_above(happens):
    ballot = in_doubt(0, 1, "b")
    happens(ballot)
    assert (ballot.life.state, ballot.refusal, sent(ballot)) == (State.DOUBT, None, [])
    ballot.recorded(0.3)
    assert {name for _, name in sent(ballot)} <= {"Finalize"}


def test_in_doubt_the_word_of_the_store_above_undoes_it():
    ballot = in_doubt(0, "b")
    ballot.undo(Event.WITHDRAWN, PushRefused("aborted", "it was not committed above"), 0.2)
    assert sent(ballot) == [(0, "Rollback"), ("b", "Rollback")]


def test_a_store_that_is_ready_waits_for_the_word_above_and_not_for_ever():
    ballot = ballot_of(0, role=Role.RELAY)
    ballot.flip(2.0, 0.1)
    assert ballot.life.state is State.PREPARING, "it has not voted yet"
    ballot.prepared(0, Prepared("s"), 0.1)
    assert (ballot.life.state, ballot.deadline) == (State.READY, 0.1 + LIMITS.word)
    ballot.tick(0.1 + LIMITS.word)
    assert ballot.refusal is not None
    assert (ballot.refusal.code, ballot.life.state) == ("deadline", State.UNDOING)


def test_a_store_left_behind_is_waited_for_until_it_is_fenced_or_its_lease_is_over():
    for fenced in (True, False):
        ballot = ballot_of(0, "b", may_miss=frozenset("b"), serves_until=lambda store: 8.0)
        ballot.prepared(0, Prepared("s"), 0.1)
        ballot.store_voted("b", Prepared("s", ok=False, error="no memory"), Tally(0, 0), "", 0.2)
        ballot.flipped_by(0, Flipped("s"), 0.3)
        assert (ballot.life.state, ballot.deadline) == (State.FENCING, 8.0)
        ballot.tick(7.9)
        assert ballot.life.state is State.FENCING
        if fenced:
            ballot.fenced("b", 1.0)
        else:
            ballot.tick(8.0)
        assert ballot.life.state is State.FLIPPED


@pytest.mark.parametrize("when", ["in doubt", "live"])
def test_an_adapters_commit_is_not_over_while_a_store_that_was_lost_may_serve_the_version_before(when):
    """Nobody below it holds output back, as they do while a model's version is decided."""
    ballot = in_doubt(0, "b", holds=False, serves_until=lambda store: 8.0)
    if when == "in doubt":
        ballot.gone("b", "takes no more messages", 0.2)
    ballot.recorded(0.3)
    ballot.finalized(0, Finalized("s", 1.0), 0.4)
    if when == "live":
        ballot.gone("b", "takes no more messages", 0.5)
    assert (ballot.life.state, ballot.deadline) == (State.LIVE, 8.0)
    ballot.tick(7.9)
    assert ballot.life.state is State.LIVE
    ballot.tick(8.0)
    assert ballot.life.state is State.OVER


def test_a_models_commit_is_over_without_a_store_that_was_lost():
    """All below it hold their output until they know what is live."""
    ballot = in_doubt(0, "b", serves_until=lambda store: 8.0)
    ballot.gone("b", "takes no more messages", 0.2)
    ballot.recorded(0.3)
    ballot.finalized(0, Finalized("s", 1.0), 0.4)
    assert ballot.life.state is State.OVER


def test_silence_of_others_is_not_waited_for_longer_because_a_store_was_lost():
    ballot = in_doubt(0, "b", holds=False, serves_until=lambda store: 0.5)
    ballot.gone("b", "takes no more messages", 0.2)
    ballot.recorded(0.3)
    assert ballot.deadline == 0.5
    ballot.tick(0.5)
    assert (ballot.life.state, ballot.deadline) == (State.LIVE, 0.3 + LIMITS.finalize)
    ballot.tick(0.3 + LIMITS.finalize)
    assert ballot.life.state is State.OVER


def test_a_vote_counts_once_and_for_its_own_question():
    ballot = ballot_of(0, 1)
    for _ in range(2):
        ballot.prepared(0, Prepared("s"), 0.1)
    ballot.flipped_by(1, Flipped("s"), 0.1)
    ballot.prepared(1, Prepared("an earlier one"), 0.1)
    assert ballot.life.state is State.PREPARING
    ballot.prepared(1, Prepared("s"), 0.2)
    ballot.prepared(0, Prepared("s", ok=False), 0.3)  # said too late to count
    ballot.flipped_by(0, Flipped("s"), 0.3)
    assert ballot.life.state is State.FLIPPING


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
    ballot = ballot_of(*range(voters))
    seen: list[tuple[int, object]] = []
    prepared: set[int] = set()
    for what, number, ok, session in inputs:
        now += 0.7
        match what:
            case "prepared":
                waits = ballot.life.state is State.PREPARING and session == "s" and ok
                prepared |= {number} if waits else set()
                ballot.prepared(number, Prepared(session, ok=ok), now)
            case "flipped":
                ballot.flipped_by(number, Flipped(session, ok=ok), now)
            case "finalized":
                ballot.finalized(number, Finalized(session, 1.0), now)
            case "rolled_back":
                ballot.rolled_back(number, RolledBack(session), now)
            case "gone":
                ballot.gone(number, "died", now)
            case "tick":
                ballot.tick(now)
            case "fail":
                ballot.undo(Event.REFUSED, PushRefused("aborted", "x"), now)
            case "record" if ballot.life.state is State.FLIPPED:
                ballot.recorded(now)
                recorded = True
        seen += ballot.outbox
        ballot.outbox.clear()
    kinds = {type(message) for _, message in seen}
    assert not {Finalize, Rollback} <= kinds
    assert (Finalize in kinds) <= recorded
    assert recorded == (ballot.refusal is None and ballot.life.state in (State.LIVE, State.OVER))
    flipped = {number for number, message in seen if isinstance(message, Flip)}
    assert flipped <= prepared
    for _ in range(3):
        now += 10.1
        ballot.tick(now)
    if ballot.life.state is State.FLIPPED:
        ballot.recorded(now)
        ballot.tick(now + 1.1)
    assert ballot.life.state is State.OVER


def test_a_store_below_counts_as_it_said_with_its_vote_and_reports_for_all_below_it():
    ballot = ballot_of(0, "low", may_miss=frozenset())
    assert (ballot.stores, ballot.replicas) == (2, 2), "before it has said"
    ballot.store_voted("low", Prepared("s"), Tally(3, 7), "", 0.1)
    assert (ballot.stores, ballot.replicas) == (4, 8)
    ballot.store_voted("low", Prepared("s"), Tally(9, 9), "", 0.1)  # twice
    assert (ballot.stores, ballot.replicas) == (4, 8)
    ballot.prepared(0, Prepared("s"), 0.1)
    ballot.flipped_by(0, Flipped("s"), 0.2)
    ballot.store_voted("low", Flipped("s"), Tally(3, 7), "", 0.2)
    ballot.recorded(0.3)
    assert ballot.flipped == 8
    ballot.store_finalized("low", {"0": 5.0}, 0.4)
    ballot.finalized(0, Finalized("s", 1.0), 0.4)
    assert (ballot.life.state, ballot.stall_ms) == (State.OVER, {"low/0": 5.0, "0": 1.0})


def test_patience_is_less_with_a_store_that_may_miss():
    limits = Limits(prepare=10.0, flip=2.0, rollback=1.0, finalize=1.0, behind=4.0)
    life = Life(Role.ROOT)
    life.fire(Event.SENT)
    life.fire(Event.WHOLE)
    ballot = Ballot(life, "s", LIVE, "keep", {0, "low"}, limits, frozenset({"low"}), serves_until=lambda store: 30.0)
    ballot.prepare(Event.COMMIT, 0.0)
    assert (ballot.patience("low", 1.0), ballot.patience(0, 1.0), ballot.patience(0, 11.0)) == (3.0, 9.0, 0.0)
    assert ballot.deadline == 4.0
    sent(ballot)
    ballot.tick(4.0)
    assert (ballot.behind, ballot.refusal) == ({"low": "did not answer to prepare in time"}, None)
    assert sent(ballot) == [("low", "Rollback")], "should it wake"
    assert ballot.deadline == 10.0, "of who must take part"
    ballot.undo(Event.OPERATOR_ABORTS, PushRefused("aborted", "no more"), 5.0)
    ballot.rolled_back(0, RolledBack("s"), 5.5)
    assert ballot.life.state is State.OVER, "nobody waits for a fence of what is not recorded"
    assert not ballot._fences


def test_a_store_that_is_lost_is_left_behind_where_it_may_be_and_ends_it_where_not():
    for may_miss in (frozenset[str](), frozenset({"low"})):
        ballot = ballot_of(0, "low", may_miss=may_miss)
        sent(ballot)
        ballot.gone("low", "is lost", 0.1)
        if may_miss:
            assert (ballot.behind, ballot.refusal) == ({"low": "is lost"}, None)
            assert (ballot.life.state, sent(ballot)) == (State.PREPARING, [("low", "Rollback")])
        else:
            assert ballot.refusal is not None
            assert (ballot.refusal.rank, ballot.refusal.retryable) == ("low", True)
            assert ballot.life.state is State.UNDOING


def test_a_relay_without_anybody_flips_when_it_is_told():
    ballot = ballot_of(role=Role.RELAY)
    assert ballot.life.state is State.READY
    ballot.flip(2.0, 0.1)
    assert ballot.life.state is State.FLIPPED


def test_a_store_is_told_of_silence_by_the_time_that_the_one_above_gave():
    ballot = ballot_of(0, role=Role.RELAY)
    ballot.prepared(0, Prepared("s"), 0.1)
    ballot.flip(1.5, 0.2)
    ballot.tick(1.7)
    assert ballot.refusal is not None
    assert ballot.refusal.message == "replica 0 did not answer to flip within 1.5 s"


def test_a_vote_on_another_session_counts_for_nothing():
    """One that was given up: its replica answers late, and has prepared other bytes."""
    ballot = ballot_of(0)
    ballot.prepared(0, Prepared("the one before"), 0.1)
    assert ballot.life.state is State.PREPARING
    ballot.prepared(0, Prepared("s"), 0.1)
    ballot.flipped_by(0, Flipped("the one before"), 0.2)
    assert ballot.life.state is State.FLIPPING
    ballot.flipped_by(0, Flipped("s", ok=False, error="no"), 0.2)
    assert ballot.refusal is not None
    assert ballot.refusal.message == "replica 0 rank 0 failed to flip: no"
    ballot.rolled_back(0, RolledBack("the one before"), 0.3)
    assert ballot.life.state is State.UNDOING


@pytest.mark.parametrize("reach", [ballot_of, to_flip, "ready", "live", "undoing"])
def test_before_its_time_a_turn_of_the_loop_changes_nothing(reach):
    if reach == "ready":
        ballot = ballot_of(0, role=Role.RELAY)
        ballot.prepared(0, Prepared("s"), 0.1)
    elif reach == "live":
        ballot = to_record(0, 1)
        ballot.recorded(0.3)
    elif reach == "undoing":
        ballot = to_flip(0, 1)
        ballot.flipped_by(0, Flipped("s", ok=False, error="no"), 0.2)
    else:
        ballot = reach(0, 1)
    state, refusal = ballot.life.state, ballot.refusal
    sent(ballot)
    ballot.tick(ballot.deadline - 0.01)
    assert (ballot.life.state, ballot.refusal, ballot.lost, sent(ballot)) == (state, refusal, [], [])


def test_where_too_few_stores_take_part_nobody_is_asked_to_flip():
    ballot = ballot_of(0, needed=2)
    ballot.prepared(0, Prepared("s"), 0.1)
    assert ballot.refusal is not None
    assert ballot.refusal.message == "1 stores take part, 2 must"
    assert sent(ballot) == [(0, "Prepare"), (0, "Rollback")]


@pytest.mark.parametrize("flipping", [False, True])
def test_stores_that_may_miss_it_end_it_once_too_few_are_left(flipping):
    """At once, whatever others still owe. What the last of them said is what went wrong; it may go well next time."""
    ballot = ballot_of(0, "a", "b", "c", may_miss=frozenset("abc"), needed=3, serves_until=lambda store: 30.0)
    if flipping:
        ballot.prepared(0, Prepared("s"), 0.1)
        for store in "abc":
            ballot.store_voted(store, Prepared("s"), Tally(1, 1), "", 0.1)
    no = (Flipped if flipping else Prepared)("s", ok=False, error="no memory", tensors=["x"])
    sent(ballot)
    ballot.store_voted("a", no, Tally(0, 0), "", 0.2)
    assert (ballot.refusal, ballot.stores) == (None, 3)
    ballot.gone("b", "is lost", 0.3)
    assert ballot.refusal is not None
    assert ballot.refusal.message == "2 stores are left, 3 must take part; store b is lost"
    assert (ballot.refusal.code, ballot.refusal.rank, ballot.refusal.retryable) == ("refused", "b", True)
    assert sent(ballot) == [("a", "Rollback"), ("b", "Rollback"), (0, "Rollback"), ("c", "Rollback")]


def test_of_stores_that_are_late_together_none_is_left_behind_once_it_is_over():
    ballot = ballot_of(0, "a", "b", may_miss=frozenset("ab"), needed=3, serves_until=lambda store: 30.0)
    ballot.prepared(0, Prepared("s"), 0.1)
    ballot.tick(10.0)
    assert ballot.refusal is not None
    assert ballot.refusal.code == "deadline"
    assert ballot.behind.keys() == {"a"}, "b goes back as the others do, and serves on"
    ballot.rolled_back("b", RolledBack("s"), 10.1)
    ballot.rolled_back(0, RolledBack("s"), 10.1)
    assert (ballot.life.state, ballot.lost) == (State.OVER, [])


@pytest.mark.parametrize("role", [Role.ROOT, Role.RELAY])
@pytest.mark.parametrize("flipping", [False, True])
def test_a_turn_that_comes_so_late_that_all_time_is_over_goes_on_without_a_store_that_may_miss_it(role, flipping):
    """As where the store itself had no processor, or its host slept: both deadlines are passed at once."""
    ballot = ballot_of(0, "b", role=role, may_miss=frozenset("b"), serves_until=lambda store: 40.0)
    ballot.prepared(0, Prepared("s"), 0.1)
    if flipping:
        ballot.store_voted("b", Prepared("s"), Tally(1, 1), "", 0.1)
        ballot.flip(1.0, 0.2)
        ballot.flipped_by(0, Flipped("s"), 0.2)
    ballot.tick(30.0)
    assert ballot.behind == {"b": f"did not answer to {'flip' if flipping else 'prepare'} in time"}
    assert ballot.refusal is None
    if not flipping:
        assert ballot.life.state is (State.READY if role is Role.RELAY else State.FLIPPING)
        ballot.flip(1.0, 30.0)
        ballot.flipped_by(0, Flipped("s"), 30.1)
    assert ballot.life.state is State.FENCING
    ballot.tick(40.0)
    ballot.recorded(40.0)
    assert ballot.flipped == 1


def test_nobody_waits_for_a_store_that_cannot_be_serving():
    ballot = ballot_of(0, "b", may_miss=frozenset("b"), serves_until=lambda store: 0.1)
    ballot.gone("b", "is lost", 0.2)
    ballot.prepared(0, Prepared("s"), 0.3)
    ballot.flipped_by(0, Flipped("s"), 0.4)
    assert ballot.life.state is State.FLIPPED


def test_of_an_adapter_stores_alone_are_asked_to_flip():
    """They note that it may go live; replicas hold both versions, and have nothing to do before one is."""
    ballot = ballot_of(0, "b", holds=False)
    ballot.prepared(0, Prepared("s"), 0.1)
    ballot.store_voted("b", Prepared("s"), Tally(1, 1), "", 0.1)
    assert sent(ballot) == [(0, "Prepare"), ("b", "Prepare"), ("b", "Flip")]
    assert ballot.life.state is State.FLIPPING
    ballot.store_voted("b", Flipped("s"), Tally(1, 1), "", 0.2)
    assert ballot.life.state is State.FLIPPED
    ballot.recorded(0.3)
    assert sent(ballot) == [(0, "Finalize"), ("b", "Finalize")]


def test_weights_that_kill_the_last_replica_here_do_not_go_live_for_the_sake_of_stores_below():
    ballot = ballot_of(0, "b")
    ballot.gone(0, "died", 0.1)
    assert ballot.refusal is not None
    assert (ballot.refusal.rank, ballot.life.state) == ("replica 0", State.UNDOING)
    ballot.rolled_back("b", RolledBack("s"), 0.2)
    assert ballot.life.state is State.OVER


def test_no_store_is_given_more_time_than_there_is():
    """However patient one is with those that may miss it."""
    ballot = ballot_of(0, "b", may_miss=frozenset("b"))
    assert ballot.limits.behind > ballot.limits.prepare
    assert ballot.patience("b", 1.0) == ballot.patience(0, 1.0) == 9.0
    assert ballot.deadline == 10.0


def test_why_everybody_goes_back_is_in_the_versions_trail():
    ballot = ballot_of(0)
    ballot.prepared(0, Prepared("s", ok=False, error="no memory"), 0.1)
    assert ballot.life.trail[-1][2:] == (State.UNDOING, "replica 0 rank 0 cannot prepare: no memory")


def test_a_no_of_who_was_not_asked_or_has_answered_counts_for_nothing():
    ballot = ballot_of(0, 1)
    ballot.prepared(7, Prepared("s", ok=False, error="a stranger's"), 0.1)
    ballot.prepared(0, Prepared("s"), 0.1)
    ballot.prepared(0, Prepared("s", ok=False, error="said twice"), 0.1)
    assert (ballot.refusal, ballot.life.state) == (None, State.PREPARING)
