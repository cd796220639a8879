"""Errors of the weight manager.

WeightManagerError
+-- PushRefused         a push cannot go on; becomes the `Error` or `Result` its sender gets
|   +-- CheckpointError a checkpoint directory cannot be used as it is
+-- IllegalTransition   a bug of ours: a session was asked for a step its state does not allow
+-- StartError          the store cannot start; the message says what to change
    +-- TooSlow         not within the time that an option gives it: another start would end the same way
"""

from collections.abc import Sequence

import msgspec

from rollout_client.protocol import Error, ErrorCode

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no message: text in them may be none, and they may nest without end."""


class WeightManagerError(Exception):
    """Base of all errors raised here."""


class PushRefused(WeightManagerError):
    """What a trainer or an operator asked for cannot be done; what is served has not changed.

    code: as on the wire. tensors: every tensor that is wrong. rank: "replica 1 rank 0" when a rank said no.
    retryable: the same request may succeed later.
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
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message
        self.tensors = list(tensors)
        self.rank = rank
        self.retryable = retryable

    def to_wire(self, session: str = "") -> Error:
        """The reply a trainer gets."""
        return Error(
            code=self.code,
            message=self.message,
            session=session,
            tensors=self.tensors,
            rank=self.rank,
            retryable=self.retryable,
        )


class CheckpointError(PushRefused):
    """A checkpoint directory is missing, malformed or does not hold the served tensors."""

    def __init__(self, message: str, tensors: Sequence[str] = (), *, code: ErrorCode = "io") -> None:
        super().__init__(code, message, tensors)


class IllegalTransition(WeightManagerError):
    """A state machine was driven wrongly; the message holds its history."""


class StartError(WeightManagerError):
    """The store cannot start: bad configuration, no space, no checkpoint."""


class TooSlow(StartError):
    """What a start begins with was not there in time; the message names the option that gives it more."""
