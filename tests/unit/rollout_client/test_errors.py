from typing import get_args

from rollout_client.errors import BY_CODE, InvalidPush, PushError, RolloutError, from_wire
from rollout_client.protocol import Error, ErrorCode


def test_every_code_has_an_exception():
    assert set(BY_CODE) == set(get_args(ErrorCode))
    assert all(issubclass(kind, PushError) for kind in BY_CODE.values())
    assert issubclass(PushError, RolloutError)


def test_what_the_store_said_is_all_there():
    error = from_wire(Error("missing_tensor", "w was not sent", "s", ["w"], "replica 0 rank 1", True))
    assert isinstance(error, InvalidPush)
    assert str(error) == "w was not sent [missing_tensor]"
    assert (error.code, error.tensors, error.rank, error.retryable) == (
        "missing_tensor",
        ["w"],
        "replica 0 rank 1",
        True,
    )
