"""Plans by name: a trainer that pushes the same tensors again names them, and is not told again where they go.

Names are drawn anew for each plan and each life of a store: one that another life has given is unknown, and so is one
that is not among the last few. The trainer then sends its parts. A name stands for parts, never for where they go: that
is planned as ever, and the copies are said again if they are others than they were.
"""

import secrets
from collections import OrderedDict
from typing import NamedTuple

import msgspec

from rollout_client.protocol import Begin, Copy, Part, Placement
from weight_manager.errors import PushRefused

KEPT = 32
"""Plans; the one unheard of for longest is forgotten."""


class _Known(NamedTuple):
    parts: list[Part]
    copies: list[Copy]


class KnownPlans:
    """Those of pushes of one trainer rank."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def complete(self, begin: Begin) -> Begin:
        """With its parts. Raises PushRefused unknown_plan; bad_message if it has both."""
        if not begin.plan:
            return begin
        if begin.parts or begin.world > 1:
            raise PushRefused("bad_message", "a plan stands for all parts of a push of one trainer rank")
        known = self._known.get(begin.plan)
        if known is None:
            raise PushRefused("unknown_plan", f"plan {begin.plan!r} is not known here: send the parts", retryable=True)
        self._known.move_to_end(begin.plan)
        return msgspec.structs.replace(begin, parts=known.parts)

    def name(self, begin: Begin, placement: Placement) -> Placement:
        """With its plan's name, and without copies that the trainer has. begin: complete, and what was answered."""
        if begin.world > 1:
            return placement
        known = self._known.get(begin.plan)
        if known is not None and known.copies == placement.copies:
            return msgspec.structs.replace(placement, plan=begin.plan, copies=[])
        plan = secrets.token_hex(8)
        self._known[plan] = _Known(begin.parts, placement.copies)
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return msgspec.structs.replace(placement, plan=plan)
