"""Plans that trainers name instead of telling parts."""

import pytest

from rollout_client.protocol import Begin, Copy, Part, Placement
from weight_manager.errors import PushRefused
from weight_manager.known_plans import KEPT, KnownPlans

PARTS = [Part("a", "float32", (3, 4)), Part("b", "float32", (5,))]
COPIES = [Copy(0, (12,), 0, (1,), 0, (1,), "float32"), Copy(1, (5,), 0, (1,), 16, (1,), "float32")]


def placed(copies=COPIES):
    return Placement("s", 10.0, 0, 4096, list(copies), 7)


def test_a_name_stands_for_the_parts_and_copies_that_stay_are_not_said_again():
    plans = KnownPlans()
    first = plans.name(Begin(1, PARTS), placed())
    assert first.copies == COPIES
    again = plans.complete(Begin(2, [], plan=first.plan, force=True))
    assert (again.version, again.force, again.parts) == (2, True, PARTS)
    answer = plans.name(again, placed())
    assert (answer.plan, answer.copies, answer.write_epoch) == (first.plan, [], 7)


def test_copies_that_have_changed_are_said_under_another_name():
    plans = KnownPlans()
    first = plans.name(Begin(1, PARTS), placed())
    moved = [COPIES[0], Copy(1, (5,), 0, (1,), 32, (1,), "float32")]
    answer = plans.name(plans.complete(Begin(2, [], plan=first.plan)), placed(moved))
    assert (answer.plan != first.plan, answer.copies) == (True, moved)
    assert plans.complete(Begin(3, [], plan=answer.plan)).parts == PARTS


def test_a_name_of_another_life_is_unknown():
    name = KnownPlans().name(Begin(1, PARTS), placed()).plan
    with pytest.raises(PushRefused) as refused:
        KnownPlans().complete(Begin(2, [], plan=name))
    assert (refused.value.code, refused.value.retryable) == ("unknown_plan", True)


def test_the_one_unheard_of_for_longest_is_forgotten():
    plans = KnownPlans()
    names = [plans.name(Begin(1, PARTS), placed()).plan for _ in range(KEPT)]
    plans.complete(Begin(1, [], plan=names[0]))
    plans.name(Begin(1, PARTS), placed())
    assert plans.complete(Begin(1, [], plan=names[0])).parts == PARTS
    with pytest.raises(PushRefused, match=names[1]):
        plans.complete(Begin(1, [], plan=names[1]))


@pytest.mark.parametrize("begin", [Begin(1, PARTS, plan="x"), Begin(1, [], plan="x", world=2)], ids=["parts", "ranks"])
def test_a_plan_stands_for_all_parts_of_one_rank(begin):
    with pytest.raises(PushRefused) as refused:
        KnownPlans().complete(begin)
    assert refused.value.code == "bad_message"


def test_plans_of_several_ranks_have_no_name():
    assert not KnownPlans().name(Begin(1, PARTS, world=2), placed()).plan
