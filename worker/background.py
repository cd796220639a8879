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
    rest, before = AGAIN_S, ""
    while True:
        began, said = time.monotonic(), ""
        try:
            await work()
            log.error("%s has ended; it starts over", what)
        except Exception as error:
            said = repr(error)
            if said == before:
                log.error("%s failed again: %s; it starts over in %g s", what, said, min(2 * rest, AGAIN_MAX_S))
            else:
                log.exception("%s failed; it starts over", what)
        went_on = time.monotonic() - began > AGAIN_MAX_S
        rest = AGAIN_S if went_on or said != before else min(2 * rest, AGAIN_MAX_S)
        before = said
        await asyncio.sleep(rest)
