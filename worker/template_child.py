"""``python -m worker.template_child``: writes prompts with templates that nobody trusts, and may be killed for it.

Both ways a frame is its length in 4 bytes, little-endian, and msgpack. It says READY once, then answers every
`Rendering` on stdin with an `Outcome` on stdout, until stdin ends. Memory is limited for good, CPU time for each
rendering: the last word should its parent not be there to kill it.
"""

import resource
import sys

import msgspec

from worker.chat_template import Rendering

READY = b"ready"
MEMORY = 512 << 20
"""Bytes of address space, of which Python and jinja2 take some 60 MB."""
CPU_S = 5


class Outcome(msgspec.Struct, frozen=True):
    """error: why there is no text."""

    text: str = ""
    error: str = ""


def outcome(rendering: Rendering, max_chars: int) -> Outcome:
    """What a rendering comes to. max_chars: longer texts are errors."""
    try:
        text = rendering.text()
        text.encode()  # half a character could not be sent
    except ValueError as error:
        return Outcome(error=str(error))
    if len(text) > max_chars:
        return Outcome(error=f"chat template: it wrote {len(text)} characters, and more than {max_chars} cannot fit")
    return Outcome(text)


def main() -> None:
    """See module. A MemoryError ends it: what is left of such a process is of no use."""
    max_chars = int(sys.argv[1])
    decode = msgspec.msgpack.Decoder(Rendering).decode
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    replies.write(READY)
    replies.flush()
    while len(size := requests.read(4)) == 4:
        rendering = decode(requests.read(int.from_bytes(size, "little")))
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        reply = msgspec.msgpack.encode(outcome(rendering, max_chars))
        replies.write(len(reply).to_bytes(4, "little") + reply)
        replies.flush()


if __name__ == "__main__":
    main()
