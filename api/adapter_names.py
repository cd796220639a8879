"""Adapters: which there are, as the store says, and what the `model` of a request means."""

import asyncio
import time
from typing import NamedTuple

from api.errors import ApiError, BadInput, NotFound, Unavailable
from api.model import Model
from api.schemas.adapters import Adapter
from api.weights import Weights

LOOK_AGAIN_S = 1.0
"""The store is asked about a name that is not known at most this often: another process may have just loaded it."""
ANSWER_S = 5.0
"""How long it may take to answer: it may be writing a commit to a disk that is slow to sync."""
_MOST_LOOKS = 64


class _Look(NamedTuple):
    """One time that the store was asked. answer: whether it said anything."""

    began: float
    answer: "asyncio.Task[bool]"


class AdapterNames:
    """What the store last said of them. A name belongs to the base model first."""

    def __init__(self, model: Model, weights: Weights) -> None:
        self._model = model
        self._weights = weights
        self._looks: dict[str, _Look] = {}  # names that nobody knew

    def described(self) -> list[Adapter]:
        """All by name, those that are pushed for the first time included, and which version each replica serves."""
        status = self._weights.status
        if status is None:
            return []
        serving = {number: replica.get("adapters", {}).get("live", {}) for number, replica in status.replicas.items()}
        return [
            Adapter(**entry, replicas={number: live.get(entry["name"]) for number, live in serving.items()})
            for entry in status.adapters
        ]

    async def named(self, model: str | None, lora_path: str | None = None) -> str:
        """The adapter that a request's `model` stands for; "" is the base, which no name at all means too.

        An adapter's name alone, as vLLM has it, or `base:adapter`, as SGLang has it. lora_path: SGLang's own field,
        which counts when `model` names the base. Raises NotFound for the name of nothing that is served, Unavailable
        where the store would have to say so and does not answer.
        """
        if not model or self._model.knows(model):
            return await self.loaded(lora_path, param="lora_path") if lora_path else ""
        base, colon, adapter = model.rpartition(":")
        name = adapter if colon and self._model.knows(base) else model
        if await self._known(name):
            return name
        raise self._model.unknown(model, sorted(self._weights.adapters))

    async def loaded(self, name: str, *, param: str) -> str:
        """The name itself. Raises NotFound when no adapter bears it, Unavailable when nobody can say so now."""
        if not await self._known(name):
            known = ", ".join(map(repr, sorted(self._weights.adapters))) or "none"
            raise NotFound(
                f"no adapter {name[:256]!r} is loaded; there are: {known}", code="adapter_not_found", param=param
            )
        return name

    async def check_new(self, name: str, *, in_place: bool) -> None:
        """Raises BadInput for the name of the base, or of an adapter unless it is to be replaced."""
        if self._model.knows(name):
            raise BadInput(f"The lora adapter '{name}' conflicts with a served base model.", param="lora_name")
        if not in_place and await self._known(name):
            raise BadInput(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                param="lora_name",
            )

    async def _known(self, name: str) -> bool:
        """Whether there is one; the store is asked when this process has not heard of it. Raises Unavailable."""
        if name in self._weights.adapters:
            return True
        answered = await asyncio.shield(self._look(name).answer)  # others wait for it, too
        if name in self._weights.adapters:
            return True
        if not answered:
            raise Unavailable(
                f"the weight store does not answer, and whether there is an adapter {name[:256]!r} is not known here"
            )
        return False

    def _look(self, name: str) -> _Look:
        """Ask the store, or wait with those who have just asked."""
        now = time.monotonic()
        self._looks = {
            other: look
            for other, look in self._looks.items()
            if now - look.began < LOOK_AGAIN_S or not look.answer.done()
        }
        if name not in self._looks:
            if len(self._looks) == _MOST_LOOKS:
                return next(reversed(self._looks.values()))
            self._looks[name] = _Look(now, asyncio.create_task(self._answers()))
        return self._looks[name]

    async def _answers(self) -> bool:
        try:
            await self._weights.refresh(timeout_s=ANSWER_S)
        except ApiError:
            return False
        return True
