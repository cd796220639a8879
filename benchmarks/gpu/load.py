"""Clients that generate without pause, as a process of their own so that they share nothing with the trainer.

``python -m benchmarks.gpu.load URL CLIENTS VOCAB`` goes on until its standard input is closed, then prints JSON.
"""

import asyncio
import json
import random
import sys
import threading
import time
from collections import Counter

from rollout_client import AsyncRolloutClient

PROMPT, ANSWER = 32, 24
"""Tokens."""


async def generate(url: str, clients: int, vocab: int, stop: threading.Event) -> dict[str, object]:
    ends: Counter[str] = Counter()
    versions: Counter[int] = Counter()
    mixed = 0
    client = AsyncRolloutClient(url)

    async def one(seed: int) -> None:
        nonlocal mixed
        rng = random.Random(seed)
        while not stop.is_set():
            prompt = [rng.randrange(vocab) for _ in range(PROMPT)]
            reply = await client.generate(prompt_ids=prompt, max_tokens=ANSWER, temperature=1.0)
            for output in reply.outputs:
                ends[output.finish_reason] += 1
                mixed += len(output.spans) > 1
                for span in output.spans:
                    versions[span.version] += span.end - span.start

    started = time.monotonic()
    await asyncio.gather(*(one(n) for n in range(clients)))
    seconds = time.monotonic() - started
    await client.aclose()
    return {
        "clients": clients,
        "seconds": round(seconds, 2),
        "tokens": sum(versions.values()),
        "tokens_per_s": round(sum(versions.values()) / seconds, 1),
        "answers": dict(ends),
        "answers_of_mixed_versions": mixed,
        "tokens_by_version": dict(sorted(versions.items())),
    }


def main() -> None:
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    url, clients, vocab = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps(asyncio.run(generate(url, clients, vocab, stop))))


if __name__ == "__main__":
    main()
