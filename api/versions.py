"""How weight versions are called towards other projects' clients: strings, "default" before the first push."""

from collections.abc import Iterable, Sequence
from typing import Any

from api.weights import Weights
from worker.messages import Span

INITIAL = "default"


class VersionNames:
    """version -> its name. A trainer may give the live version a name of its own; it is kept for that version."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._given: dict[int, str] = {}

    def name(self, version: int) -> str:
        """The name of a version."""
        if version in self._given:
            return self._given[version]
        live = self._weights.live
        # Version 0 of run "" was loaded at the start; a trainer's own version 0 is called 0.
        pushed = live is not None and live.version == 0 and live.run_id != ""
        return INITIAL if version == 0 and not pushed else str(version)

    @property
    def live(self) -> str:
        """The name of the live version."""
        live = self._weights.live
        return INITIAL if live is None else self.name(live.version)

    def give(self, name: str) -> None:
        """Call the live version this from now on."""
        live = self._weights.live
        if live is None or name == str(live.version):
            return
        self._given[live.version] = name
        while len(self._given) > 1024:
            del self._given[next(iter(self._given))]

    def spans(self, spans: Sequence[Span]) -> list[dict[str, Any]]:
        """`weight_versions`: half-open, over all output tokens, without gaps."""
        return [{"version": self.name(s.version), "start": s.start, "end": s.end} for s in spans]

    def newest(self, spans: Iterable[Span]) -> str:
        """`weight_version` of an output: that of its last token."""
        last = None
        for span in spans:
            last = span
        return self.live if last is None else self.name(last.version)
