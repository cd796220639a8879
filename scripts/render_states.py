"""Write docs/states.md from the transition tables in the code, or check that it is what they say.

Usage: python -m scripts.render_states [--check]
"""

import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from scripts.generated_page import write_or_check
from weight_manager import following, life
from weight_manager.following import MOVES
from weight_manager.life import Bug, Cell, Go, Ignored, Refused, Role
from worker import lifecycle

PAGE = Path(__file__).parent.parent / "docs" / "states.md"
Edges = Mapping[Any, Enum]
INTRODUCTION = """\
# States

Written by `python -m scripts.render_states` from the tables that the code runs; edit those, not this page."""

VERSION = """\
## A pushed version

`weight_manager/life.py`; who owes an answer meanwhile: `weight_manager/ballot.py`. See ADR 13.

Every event in every state is decided. A cell names the state after the event. **no**: whoever asked is told why not.
*late*: or said twice; nothing changes. An empty cell cannot be: the store would stop, with the trail of what happened.
A version begins in STAGING."""

ROLES = {
    Role.ROOT: "The root of a fleet, or a store by itself: a push to it, or a load of its own.",
    Role.RELAY: "A store below another: a session of the store above, which has the last word.",
    Role.CATCH_UP: "A store below another that missed a version: it is live above already.",
}


def render() -> str:
    """The whole page."""
    parts = [
        INTRODUCTION,
        VERSION,
        answers(),
        *(role(which) for which in Role),
        section(
            "A version that went ahead of the arena",
            "weight_manager/following.py",
            following.Way,
            following.Step,
            MOVES,
        ),
        section("Worker", "worker/lifecycle.py", lifecycle.WorkerState, lifecycle.Event, lifecycle.TRANSITIONS),
    ]
    return "\n\n".join(parts) + "\n"


def answers() -> str:
    """What a person on call asks about each state."""
    rows = [["state", "who may end it", "what bounds the wait", "a restart", "the trainer hears", "the operator"]]
    rows.append(["---"] * len(rows[0]))
    for state in life.State:
        said = life.ANSWERS[state]
        rows.append([state.name, enders(state), bounds(state), said.restart, said.trainer, said.operator])
    return "\n\n".join(["### The four questions", lines_of(rows)])


def enders(state: life.State) -> str:
    """Who of those that could: trainers push to the root, and only a store below has one above."""
    could = {e for r in Role for e in life.ABORTS if not isinstance(life.CELLS.get((r, state, e), Bug("")), Bug)}
    can = {e for r in Role if state in life.states_of(r) for e in life.may_end(r, state)}
    can_not = [e.value for e in life.ABORTS if e in could - can]
    if len(can) > len(can_not):
        return "anybody" + (f"; not because {', '.join(can_not)}" if can_not else "")
    return ", ".join(e.value for e in life.ABORTS if e in can) or "nobody"


def bounds(state: life.State) -> str:
    """By role, where the roles differ."""
    found: dict[str, list[str]] = {}
    for role_ in Role:
        if state in life.states_of(role_):
            found.setdefault(life.bound(role_, state).value, []).append(role_.value)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(roles)}: {text}" for text, roles in found.items())


def role(which: Role) -> str:
    """One role's picture, table, and the reasons in it."""
    states = list(life.states_of(which))
    arrows: dict[tuple[str, str], list[str]] = {}
    for state in states:
        for event in life.Event:
            cell = life.CELLS[which, state, event]
            if isinstance(cell, Go):
                label = "ended" if len(life.may_end(which, state)) > 1 and event in life.ABORTS else event.value
                labels = arrows.setdefault((state.name, cell.to.name), [])
                labels += [label] if label not in labels else []
    rows = [["event", *(state.name for state in states)], ["---"] * (len(states) + 1)]
    reasons: dict[str, list[str]] = {}
    for event in life.Event:
        cells = [life.CELLS[which, state, event] for state in states]
        if all(isinstance(cell, Bug) for cell in cells):
            continue
        rows.append([f"{event.name}: {event.value}", *map(shown, cells)])
        for state, cell in zip(states, cells, strict=True):
            if isinstance(cell, Refused):
                reasons.setdefault(f"{event.name}: {cell.why}", []).append(state.name)
    why = [f"- {reason} ({', '.join(names)})" for reason, names in reasons.items()]
    title = f"### As {which.name}\n\n{ROLES[which]}"
    return "\n\n".join([title, diagram(states[0], arrows), lines_of(rows), "Why not:\n\n" + "\n".join(why)])


def shown(cell: Cell) -> str:
    """A cell of a version's table."""
    match cell:
        case Go(to):
            return to.name
        case Refused():
            return "**no**"
        case Ignored():
            return "*late*"
        case Bug():
            return ""


def section(title: str, source: str, states: Iterable[Enum], events: Iterable[Enum], edges: Edges) -> str:
    """One machine: where it lives, its picture, its table."""
    states, events = list(states), list(events)
    legend = f"`{source}`. A cell names the state after the event; an empty cell is refused, and nothing changes."
    return "\n\n".join([f"## {title}", legend, picture(states[0], edges), table(states, events, edges)])


def picture(first: Enum, edges: Edges) -> str:
    """A Mermaid diagram; events between the same two states share an arrow, those that change nothing are left out."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (before, event), after in edges.items():
        if before is not after:
            arrows.setdefault((before.name, after.name), []).append(str(event.value))
    return diagram(first, arrows)


def diagram(first: Enum, arrows: Mapping[tuple[str, str], list[str]]) -> str:
    """Arrows by their ends, with what is written on them."""
    lines = [f"    {before} --> {after}: {' / '.join(labels)}" for (before, after), labels in arrows.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}", *lines, "```"])


def table(states: list[Enum], events: list[Enum], edges: Edges) -> str:
    """Events down, states across."""
    rows = [["event", *(state.name for state in states)], ["---"] * (len(states) + 1)]
    for event in events:
        cells = (edges.get((state, event)) for state in states)
        rows.append([str(event.value), *(cell.name if cell else "" for cell in cells)])
    return lines_of(rows)


def lines_of(rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> int:
    """Exit status 1 when --check finds another text."""
    return write_or_check(PAGE, render, __doc__)


if __name__ == "__main__":
    sys.exit(main())
