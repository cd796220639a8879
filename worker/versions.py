"""How the versions that compute tokens are named here: the model's, and those of adapters."""

from typing import NamedTuple, Self

from weight_manager.messages import Live


class Version(NamedTuple):
    """A version that is live, or was: its number; the epoch, which names its commit (in batches, it alone); and the
    digest, which names its bytes on every host, as its trainer knows it too. All three are compared: a store whose
    history was moved away counts its epochs from the start.
    """

    version: int
    epoch: int
    digest: str

    @classmethod
    def of(cls, live: Live) -> Self:
        """As the store says it."""
        return cls(live.version, live.epoch, live.digest)


NO_VERSION = Version(0, 0, "")
"""Stands for what is live while nothing is, and for the adapter of what has none."""


def same(one: Live, other: Live) -> bool:
    """Whether these are one version, wherever it lies."""
    return Version.of(one) == Version.of(other)
