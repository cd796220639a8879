"""What a small copy to the device waits for while a large one is under way, stream by stream.

    python -m benchmarks.gpu.lanes [--out OUT.json]

Streams are made as a rank makes them, some urgent. A large copy (256 MiB, pinned) is queued on one; then 8 KiB on
another, by a copy engine and by a kernel that reads pinned memory itself (worker/gpu/carrying.py). Microseconds until
the small one is there, the least of three; the large one alone takes `large_us`. Needs an NVIDIA GPU, the `gpu` extra.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu.report import add_out, keep
from worker.gpu.carrying import Carrier
from worker.gpu.driver import Driver, Handle

LARGE, SMALL, ROUNDS = 256 << 20, 8 << 10, 3
URGENT = (False, False, True, False, False, True, True, False, False)
"""Of the streams, in the order in which they are made."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.lanes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_out(parser)
    args = parser.parse_args()
    driver = Driver()
    streams = [driver.stream(urgent=urgent) for urgent in URGENT]
    carry, event = Carrier(driver), driver.event()
    large, small = driver.pinned(LARGE, np.uint8), driver.pinned(SMALL, np.uint8)
    large[:] = 1
    there, here = driver.allocate(LARGE, "test"), driver.allocate(SMALL, "test")

    def waited(by: Callable[[int, Any, Handle, int], None], behind: Handle | None, on: Handle) -> float:
        least = float("inf")
        for _ in range(ROUNDS):
            if behind is not None:
                driver.to_device(there, large, behind)
            began = time.perf_counter()
            by(here, small, on, SMALL)
            driver.record(event, on)
            driver.wait(event, event=True)
            least = min(least, time.perf_counter() - began)
            for stream in streams:
                driver.wait(stream)
        return round(1e6 * least, 1)

    ways: dict[str, Callable[[int, Any, Handle, int], None]] = {"copy": driver.to_device, "kernel": carry}
    result: dict[str, Any] = {
        "device": driver.name,
        "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
        "urgent": URGENT,
        "large_us": waited(lambda *_: None, streams[0], streams[0]),
    }
    for name, by in ways.items():
        waited(by, None, streams[0])
        result[f"{name} alone"] = [waited(by, None, on) for on in streams]
        result[f"{name} behind"] = [
            [waited(by, behind, on) if behind is not on else None for on in streams] for behind in streams
        ]
        print(f"{name}: alone", result[f"{name} alone"])
        for number, row in enumerate(result[f"{name} behind"]):
            print(f"  behind {LARGE >> 20} MiB on stream {number}:", row)
    keep(result, args.out)


if __name__ == "__main__":
    main()
