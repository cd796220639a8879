"""Work that goes on as long as the service does: a bug in it is logged and it starts over, it never just stops."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

log = logging.getLogger(__name__)

AGAIN_S = 0.5
"""How long work that failed rests, so that what fails at once does not take the processor; doubled each time ..."""
AGAIN_MAX_S = 10.0
"""... up to this. What went on for longer than this begins with the first rest again."""


async def kept(what: str, work: Callable[[], Coroutine[Any, Any, object]]) -> NoReturn:
    """Run work() for ever, until cancelled. What it fails with is said whole once, and in a line after that."""
    rest = AGAIN_S
    before: str | None = None  # what it failed with the last time; "" = it ended
    while True:
        began = time.monotonic()
        failed: Exception | None = None
        try:
            await work()
        except Exception as error:
            failed = error
        said = repr(failed) if failed else ""
        again = said == before and time.monotonic() - began <= AGAIN_MAX_S
        rest = min(2 * rest, AGAIN_MAX_S) if again else AGAIN_S
        if failed is None:
            log.error("%s has ended; it starts over in %g s", what, rest)
        elif said == before:
            log.error("%s failed again: %s; it starts over in %g s", what, said, rest)
        else:
            log.error("%s failed; it starts over in %g s", what, rest, exc_info=failed)
        before = said
        await asyncio.sleep(rest)
