"""Write docs/states.md from the transition tables in the code, or check that it is what they say.

Usage: python -m scripts.render_states [--check]
"""

import argparse
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from weight_manager import session
from worker import lifecycle

PAGE = Path(__file__).parent.parent / "docs" / "states.md"
Edges = Mapping[Any, Enum]
INTRODUCTION = """\
# States

Written by `python -m scripts.render_states` from the tables that the code runs; edit those, not this page.
A cell names the state after the event; an empty cell is refused, and nothing changes."""


def render() -> str:
    """The whole page."""
    parts = [
        INTRODUCTION,
        section("Push session", "weight_manager/session.py", session.State, session.Event, session.TRANSITIONS),
        section("Worker", "worker/lifecycle.py", lifecycle.WorkerState, lifecycle.Event, lifecycle.TRANSITIONS),
    ]
    return "\n\n".join(parts) + "\n"


def section(title: str, source: str, states: Iterable[Enum], events: Iterable[Enum], edges: Edges) -> str:
    """One machine: where it lives, its picture, its table."""
    states, events = list(states), list(events)
    return "\n\n".join([f"## {title}", f"`{source}`", picture(states[0], edges), table(states, events, edges)])


def picture(first: Enum, edges: Edges) -> str:
    """A Mermaid diagram; events between the same two states share an arrow, those that change nothing are left out."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (before, event), after in edges.items():
        if before is not after:
            arrows.setdefault((before.name, after.name), []).append(str(event.value))
    lines = [f"    {before} --> {after}: {' / '.join(labels)}" for (before, after), labels in arrows.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}", *lines, "```"])


def table(states: list[Enum], events: list[Enum], edges: Edges) -> str:
    """Events down, states across."""
    rows = [["event", *(state.name for state in states)], ["---"] * (len(states) + 1)]
    for event in events:
        cells = (edges.get((state, event)) for state in states)
        rows.append([str(event.value), *(cell.name if cell else "" for cell in cells)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> int:
    """Exit status 1 when --check finds another text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not current")
    text = render()
    if parser.parse_args().check:
        if not PAGE.exists() or PAGE.read_text() != text:
            print(f"{PAGE} is not what the tables say: run `make format`", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
