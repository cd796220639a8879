"""Counter-based random numbers: one stream per (seed, sample), addressed by position.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). Nothing is carried from one
draw to the next, so a token's draw does not depend on what else is in the batch, on preemption, or on order.
"""

import numpy as np
import numpy.typing as npt

from worker import softmax

UInt64 = npt.NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: tuple[UInt64, UInt64, UInt64, UInt64], key: tuple[UInt64, UInt64]) -> tuple[UInt64, ...]:
    """Four 32-bit words (in uint64 arrays) for each counter and key, both given as 32-bit words in uint64 arrays."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _HALF) ^ c1 ^ k0, second & _LOW, (first >> _HALF) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: list[int], samples: list[int], positions: list[int], purpose: int = 0) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits per row. Seeds of any size are taken modulo 2**64.

    purpose: numbers for different purposes at one position are independent.
    """
    seed = np.array([value & 0xFFFFFFFFFFFFFFFF for value in seeds], np.uint64)
    return uniforms_of(seed, np.array(samples, np.uint64), np.array(positions, np.uint64), purpose)


def uniforms_of(seeds: UInt64, samples: UInt64, positions: UInt64, purpose: int = 0) -> npt.NDArray[np.float64]:
    """`uniforms` of C-contiguous arrays; samples and positions below 2**32."""
    kernels = softmax.load()
    if kernels is not None:
        return kernels.uniforms(seeds, samples, positions, purpose)
    zeros = np.zeros_like(seeds)
    counter = (positions, samples, zeros + np.uint64(purpose), zeros)
    high, low, _, _ = philox(counter, (seeds & _LOW, seeds >> _HALF))
    mantissa = (high >> np.uint64(5)) * np.uint64(1 << 26) + (low >> np.uint64(6))
    return mantissa.astype(np.float64) * 2.0**-53
