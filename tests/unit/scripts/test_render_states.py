"""docs/states.md is what the transition tables say."""

from enum import Enum

from scripts.render_states import PAGE, picture, render, table


class Door(Enum):
    OPEN = "open"
    SHUT = "shut"


class Event(Enum):
    PUSH = "push"
    KNOCK = "knock"


EDGES = {(Door.OPEN, Event.PUSH): Door.SHUT, (Door.SHUT, Event.PUSH): Door.OPEN, (Door.SHUT, Event.KNOCK): Door.SHUT}


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == render()


def test_a_table_has_events_down_and_states_across() -> None:
    assert table(list(Door), list(Event), EDGES).splitlines() == [
        "| event | OPEN | SHUT |",
        "| --- | --- | --- |",
        "| push | SHUT | OPEN |",
        "| knock |  | SHUT |",
    ]


def test_a_picture_leaves_out_what_changes_nothing() -> None:
    assert picture(Door.OPEN, EDGES).splitlines()[2:-1] == [
        "    [*] --> OPEN",
        "    OPEN --> SHUT: push",
        "    SHUT --> OPEN: push",
    ]
