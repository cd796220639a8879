"""Work that goes on as long as the service does: a bug in it is logged and it starts over, it never just stops."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

log = logging.getLogger(__name__)

AGAIN_S = 0.5
"""How long work that failed rests, so that what fails at once does not take the processor."""


async def kept(what: str, work: Callable[[], Coroutine[Any, Any, object]]) -> NoReturn:
    """Run work() for ever, until cancelled."""
    while True:
        try:
            await work()
            log.error("%s has ended; it starts over", what)
        except Exception:
            log.exception("%s failed; it starts over", what)
        await asyncio.sleep(AGAIN_S)
