"""Bodies of the routes that look into the live weights, and of the way back."""

from typing import Any, Literal

from pydantic import Field

from api.schemas.base import Digests, Strict


class RollbackRequest(Strict):
    """Go back to the previous version, on every store of the fleet or on none."""

    in_flight: Literal["keep", "recompute", "abort", "wait"] = "keep"
    deadline_s: float = Field(default=60.0, gt=0, le=600)


class RollbackResponse(Strict):
    """The version that is live again, and the commit's report."""

    version: int
    report: dict[str, Any]


class ChecksumsRequest(Strict):
    """baseline: digests of an earlier answer, by "name" (tensors that are whole somewhere) or "name@rank"."""

    baseline: Digests = Field(default={})


class ChecksumsResponse(Strict):
    """xxh3-64 of every parameter as each rank holds it: replica -> rank -> name -> 16 hex digits.

    differing: parameters of which two replicas hold other bytes in the same rank; empty when all serve the same.
    """

    replicas: dict[str, dict[str, dict[str, str]]]
    differing: list[str]


class SlotChecksums(Strict):
    """xxh3-64 of each rank's piece of each tensor in the live slot; rank "-1": read by every rank."""

    version: int
    digest: str
    ranks: dict[str, dict[str, str]]
    differ: list[str]
    """Names of the baseline whose digests are others now, or that are not there."""


class TensorBytes(Strict):
    """Some bytes of one live tensor, in C order of the whole, whatever ranks it is split over."""

    name: str
    version: int
    epoch: int
    """Of the commit that made it live: pieces of another are of other weights, whatever their version is called."""
    dtype: str
    shape: list[int]
    offset: int
    data: str
    """The bytes, in base64."""
    more: bool
