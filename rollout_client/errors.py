"""Everything this package raises on purpose.

RolloutError
+-- ArenaError          the shared memory of the service is not what it should be
+-- StoreUnavailable    no answer in time, or the store is not there; nothing is known to have changed
+-- PushError           the store answered: this push changed nothing that is served
    +-- InvalidPush         the tensors are wrong: unknown, missing, twice, overlapping, shape, dtype, size, base, NaN
    +-- ChecksumMismatch    bytes arrived that are not the trainer's
    +-- StaleVersion        the version is not above the live one
    +-- Busy                another push is running; try again
    +-- SessionLost         the session is gone: lease ran out, aborted, or the store restarted
    +-- PushRefused         a rank voted no
    +-- DeadlineExceeded    the store gave up waiting
    +-- Unauthorized        the token is wrong or missing
    +-- StoreFailed         the store itself failed: out of space, internal error
"""

from collections.abc import Sequence

from rollout_client.protocol import Error, ErrorCode


class RolloutError(Exception):
    """Base of all errors raised here."""


class ArenaError(RolloutError):
    """A file is no arena, or the slot asked for is not there."""


class StoreUnavailable(RolloutError):
    """The store did not answer in time."""


class PushError(RolloutError):
    """The store said no. code: as on the wire. tensors: each one that is wrong. rank: who refused, "" = none did.

    retryable: the same push may succeed later.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        tensors: Sequence[str] = (),
        *,
        rank: str = "",
        retryable: bool = False,
    ) -> None:
        super().__init__(f"{message} [{code}]")
        self.code: ErrorCode = code
        self.message = message
        self.tensors = list(tensors)
        self.rank = rank
        self.retryable = retryable


class InvalidPush(PushError):
    """The tensors do not fit what is served."""


class ChecksumMismatch(PushError):
    """What arrived differs from what was sent."""


class StaleVersion(PushError):
    """The version is not above the live one of this run."""


class Busy(PushError):
    """Another push session is running."""


class SessionLost(PushError):
    """The store no longer knows this session."""


class PushRefused(PushError):
    """A rank could not take the new weights."""


class DeadlineExceeded(PushError):
    """A step took longer than its deadline."""


class Unauthorized(PushError):
    """Wrong or missing token."""


class StoreFailed(PushError):
    """The store could not do its part."""


BY_CODE: dict[ErrorCode, type[PushError]] = {
    "bad_message": InvalidPush,
    "unauthorized": Unauthorized,
    "unsupported": InvalidPush,
    "too_large": InvalidPush,
    "busy": Busy,
    "stale_version": StaleVersion,
    "unknown_tensor": InvalidPush,
    "missing_tensor": InvalidPush,
    "duplicate_tensor": InvalidPush,
    "overlapping_tensor": InvalidPush,
    "shape_mismatch": InvalidPush,
    "dtype_mismatch": InvalidPush,
    "checksum_mismatch": ChecksumMismatch,
    "non_finite": InvalidPush,
    "base_mismatch": InvalidPush,
    "unknown_adapter": InvalidPush,
    "unknown_plan": Busy,  # not seen outside: the push begins again with its parts
    "unknown_session": SessionLost,
    "lease_expired": SessionLost,
    "refused": PushRefused,
    "not_ready": Busy,
    "deadline": DeadlineExceeded,
    "aborted": SessionLost,
    "io": StoreFailed,
    "internal": StoreFailed,
}


def from_wire(error: Error) -> PushError:
    """The exception for an `Error` reply."""
    kind = BY_CODE[error.code]
    return kind(error.code, error.message, error.tensors, rank=error.rank, retryable=error.retryable)
