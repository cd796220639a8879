"""What API processes say to each other over their Unix sockets: requests as they came, and one message of our own."""

import msgspec

ABORT = "/internal/abort"
CLIENT = b"x-rollout-client"
"""Who sent a request that another process passed on."""


class AbortHere(msgspec.Struct, frozen=True):
    """[ANY PROCESS -> ANY OTHER] POST /internal/abort: end these of your requests, or all. -> how many."""

    request_ids: list[str] | None
    timeout_s: float
