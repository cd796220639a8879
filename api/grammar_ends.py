"""Grammars that cannot end, found before anybody follows one.

A rule whose every alternative needs the rule itself, as in `start: "a" start`, lets no text be complete. What follows
such a grammar writes until its length is over; and the library, which looks ahead for as long as only one text can
follow, looks for ever. So a grammar in Lark is read here far enough to see which rules have an end: names,
alternatives, groups and repetitions. Whatever else is in it has an end, and of what cannot be read nothing is said: the
library says what is wrong with it.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator

_TOKEN = re.compile(
    r"""
      (?P<space> [^\S\n]+ | //[^\n]* | \\\n )
    | (?P<line> \n )
    | (?P<text> "(?:\\.|[^"\\\n])*"i? | /(?:\\.|[^/\\\n])+/[imslux]* | <[^<>\s]*> | @[\w.-]+ | \.\. )
    | (?P<name> (?:(?<![^\n])[?!]+)?[a-zA-Z_]\w* )
    | (?P<number> -?\d+ )
    | (?P<directive> %\w+ )
    | (?P<sign> -> | [][(){}|:,~?*+.=&] )
    """,
    re.VERBOSE,
)
_Token = tuple[str, str]


def endless_rule(lark: str) -> str:
    """A rule that `start` leads to and that no text can complete; "": there is none, or the grammar cannot be read."""
    try:
        rules = _Rules(list(_tokens(lark)))
    except ValueError:
        return ""
    ending = rules.ending()
    return next((name for name in rules.reached("start") if name.isidentifier() and name not in ending), "")


def _tokens(lark: str) -> Iterator[_Token]:
    """Kind and text. Raises ValueError for what is not known here."""
    at = 0
    while at < len(lark):
        found = _TOKEN.match(lark, at)
        if found is None:
            raise ValueError
        at = found.end()
        kind = str(found.lastgroup)
        if kind != "directive":
            if kind != "space":
                yield kind, found[0]
            continue
        begin = re.compile(r"\s*").match(lark, at)
        if begin is not None and lark.startswith("{", begin.end()):
            try:
                _, at = json.JSONDecoder().raw_decode(lark, begin.end())
            except RecursionError:
                raise ValueError from None
            if found[0] != "%llguidance":  # options of the whole, and not a part of a text
                yield "text", found[0]
        else:  # about other files and white space
            at = (lark.find("\n", at) + 1 or len(lark) + 1) - 1


class _Rules:
    """Rules, and groups in them under numbers of their own: what each alternative needs, and whatever is named in it.

    Raises ValueError for what is not known here.
    """

    def __init__(self, tokens: list[_Token]) -> None:
        self._needs: list[tuple[str, set[str]]] = []  # of each alternative: whose it is, and what it needs
        self._names: dict[str, set[str]] = {}  # of each rule and group, all that is in it
        self._open: list[tuple[str, list[str]]] = []  # what is being read: whose alternative, and what it needs so far
        self._groups = 0
        heads = {at: _after_head(tokens, at) for at in range(len(tokens)) if _begins_line(tokens, at)}
        at = 0
        while at < len(tokens):
            if body := heads.get(at, 0):
                self._close_rule()
                self._begin(tokens[at][1].lstrip("?!"))
                at = body
            else:
                at = self._read(tokens, at)
        self._close_rule()

    def ending(self) -> set[str]:
        """Rules and groups that some text completes. What is not defined here is the library's to find."""
        waiting: dict[str, list[int]] = defaultdict(list)
        left = []
        ends: set[str] = set()
        ready = []
        for index, (owner, needs) in enumerate(self._needs):
            known = [name for name in needs if name in self._names]
            left.append(len(known))
            for name in known:
                waiting[name].append(index)
            if not known:
                ready.append(owner)
        while ready:
            name = ready.pop()
            if name in ends:
                continue
            ends.add(name)
            for index in waiting[name]:
                left[index] -= 1
                if not left[index]:
                    ready.append(self._needs[index][0])
        return ends

    def reached(self, start: str) -> list[str]:
        """Rules and groups that a rule leads to, itself first."""
        seen, found = {start}, [start] if start in self._names else []
        for name in found:
            more = sorted(each for each in self._names[name] if each in self._names and each not in seen)
            seen.update(more)
            found.extend(more)
        return found

    def _begin(self, owner: str) -> None:
        self._names.setdefault(owner, set())
        self._open.append((owner, []))

    def _close_alternative(self) -> str:
        owner, needs = self._open.pop()
        self._needs.append((owner, set(needs)))
        return owner

    def _close_rule(self) -> None:
        if len(self._open) > 1:
            raise ValueError
        if self._open:
            self._close_alternative()

    def _need(self, name: str) -> None:
        owner, needs = self._open[-1]
        needs.append(name)
        self._names[owner].add(name)

    def _read(self, tokens: list[_Token], at: int) -> int:
        """One element of an alternative; returns where the next begins."""
        kind, text = tokens[at]
        if kind == "line":
            return at + 1
        if not self._open:
            raise ValueError
        needs = self._open[-1][1]
        if kind == "text":
            needs.append("")
        elif kind == "name":
            self._need(text)
        elif text in ("(", "["):
            self._groups += 1
            self._need(f"{self._groups}{text}")
            self._begin(f"{self._groups}{text}")
        elif text in (")", "]"):
            owner = self._close_alternative()
            if not self._open or (text == "]") != owner.endswith("["):
                raise ValueError
            if text == "]":
                self._open[-1][1][-1] = ""
        elif text == "|":
            self._open.append((self._close_alternative(), []))
        elif text in ("?", "*"):
            self._may_lack(needs)
        elif text in ("{", "~"):
            return self._repeat(tokens, at, needs)
        elif text == "->":
            return at + 2
        elif text != "+":
            raise ValueError
        return at + 1

    def _repeat(self, tokens: list[_Token], at: int, needs: list[str]) -> int:
        """x{m,n}, x~m..n: how often."""
        end = at + 1
        while end < len(tokens) and (tokens[end][0] == "number" or tokens[end][1] in (",", "..")):
            end += 1
        counts = [text for kind, text in tokens[at + 1 : end] if kind == "number"]
        if not counts or tokens[at + 1][1] == "," or int(counts[0]) == 0:
            self._may_lack(needs)
        if tokens[at][1] == "~":
            return end
        if end == len(tokens) or tokens[end][1] != "}":
            raise ValueError
        return end + 1

    def _may_lack(self, needs: list[str]) -> None:
        if not needs:
            raise ValueError
        needs[-1] = ""


def _begins_line(tokens: list[_Token], at: int) -> bool:
    return tokens[at][0] == "name" and (at == 0 or tokens[at - 1][0] == "line")


def _after_head(tokens: list[_Token], at: int) -> int:
    """Where the body of a rule begins whose name is here; 0: none does. Attributes or a priority may be between."""
    at += 1
    if at < len(tokens) and tokens[at][1] == "[":
        while at < len(tokens) and tokens[at][1] != "]":
            at += 1
        at += 1
    if at + 1 < len(tokens) and tokens[at][1] == "." and tokens[at + 1][0] == "number":
        at += 2
    return at + 1 if at < len(tokens) and tokens[at][1] == ":" else 0
