"""Clients in a process of their own: the trainer's Python would hold up those that shared its lock.

    python -m benchmarks.push.decoding URL SEQUENCES

Decodes until its stdin ends, then prints [when, gap] of every token as JSON; CLOCK_MONOTONIC, seconds.
"""

import asyncio
import json
import sys
import threading
import time

import numpy as np

from rollout_client import AsyncRolloutClient

PROMPT, LENGTH = 16, 1000
"""Long enough that none begins anew, which would be a prompt in the middle of the steps."""


async def decode(url: str, sequences: int, until: threading.Event) -> list[tuple[float, float]]:
    """(when, gap) of every token but each sequence's first; sequences begin anew as they end."""
    gaps: list[tuple[float, float]] = []
    client = AsyncRolloutClient(url)

    async def one(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not until.is_set():
            prompt = [int(t) for t in rng.integers(1, 4000, PROMPT)]
            last = 0.0
            async for piece in client.stream(prompt_ids=prompt, max_tokens=LENGTH, ignore_eos=True, temperature=1.0):
                now = time.monotonic()
                if last and any(output.token_ids for output in piece.outputs):
                    gaps.append((now, now - last))
                last = now
                if until.is_set():
                    break

    await asyncio.gather(*(one(n) for n in range(sequences)))
    await client.aclose()
    return gaps


def main() -> None:
    until = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        until.set()

    threading.Thread(target=wait, daemon=True).start()
    print(json.dumps(asyncio.run(decode(sys.argv[1], int(sys.argv[2]), until))))


if __name__ == "__main__":
    main()
