"""Everything the service refuses or fails with, and the one table that turns it into HTTP.

    ApiError
    ├── BadInput            400  the request is wrong; the message says what and where
    ├── Unauthorized        401  no token, or not ours
    ├── Forbidden           403  a good token that may not do this, or a switched-off route
    ├── NotFound            404
    ├── Conflict            409  the state does not allow it now; nothing happened
    ├── TooLarge            413
    ├── WrongEncoding       415  the body is compressed; nothing here unpacks it
    ├── TooMany             429  over the limit of requests; retry after a moment
    ├── EngineFailed        500  a sequence died in the engine
    ├── Unavailable         503  nobody can serve it; the call had no effect, so retrying is safe
    └── TimedOut            504  it was sent and not answered in time; its effect is not known

Routes raise these and never build error replies. Clients retry POSTs on 5xx, so anything that a retry
cannot mend is a 4xx.
"""

from rollout_client.protocol import ErrorCode


class ApiError(Exception):
    """Base: a message for the caller, and details that are safe to show. param: the field that is wrong."""

    def __init__(
        self, message: str, *, code: str = "", tensors: list[str] | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).__name__
        self.tensors = tensors or []
        self.param = param


class BadInput(ApiError):
    """The request is wrong."""


class Unauthorized(ApiError):
    """No valid token."""


class Forbidden(ApiError):
    """Not with this token, or not on this server."""


class NotFound(ApiError):
    """No such thing."""


class Conflict(ApiError):
    """Not in this state."""


class TooLarge(ApiError):
    """Over a size limit."""


class WrongEncoding(ApiError):
    """A body in an encoding that is not read."""


class TooMany(ApiError):
    """Over a rate or concurrency limit."""


class EngineFailed(ApiError):
    """The engine could not finish a sequence."""


class Unavailable(ApiError):
    """Nobody can serve it now; nothing was done."""


class TimedOut(ApiError):
    """No answer in time; the effect is not known."""


STATUS: dict[type[ApiError], int] = {
    BadInput: 400,
    Unauthorized: 401,
    Forbidden: 403,
    NotFound: 404,
    Conflict: 409,
    TooLarge: 413,
    WrongEncoding: 415,
    TooMany: 429,
    EngineFailed: 500,
    Unavailable: 503,
    TimedOut: 504,
}

FROM_STORE: dict[ErrorCode, type[ApiError]] = {
    "bad_message": BadInput,
    "unauthorized": Forbidden,
    "unsupported": BadInput,
    "too_large": TooLarge,
    "busy": Conflict,
    "stale_version": Conflict,
    "unknown_tensor": BadInput,
    "missing_tensor": BadInput,
    "duplicate_tensor": BadInput,
    "overlapping_tensor": BadInput,
    "shape_mismatch": BadInput,
    "dtype_mismatch": BadInput,
    "checksum_mismatch": BadInput,
    "non_finite": BadInput,
    "base_mismatch": Conflict,
    "unknown_adapter": NotFound,
    "unknown_plan": Conflict,
    "unknown_session": Conflict,
    "lease_expired": Conflict,
    "refused": Conflict,
    "not_ready": Unavailable,
    "deadline": Conflict,
    "aborted": Conflict,
    "io": BadInput,
    "internal": EngineFailed,
}
"""What a store's refusal means to an HTTP caller. Every one of them left what is served unchanged."""


def status_of(error: ApiError) -> int:
    """HTTP status of an error."""
    return STATUS[type(error)]


def from_store(code: ErrorCode | None, message: str, tensors: list[str]) -> ApiError:
    """The error a store's refusal becomes."""
    return FROM_STORE[code or "internal"](message, code=code or "internal", tensors=tensors)
