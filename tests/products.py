"""What this processor computes in oneDNN's and our compiled products; tests of what it does not are skipped, aloud.

Without AVX-512 oneDNN multiplies no bfloat16, and adds float32 up in orders that our products of few tokens do not
have: `deterministic auto` is off there.
"""

from pathlib import Path

import pytest

from worker.models.onednn_backend import why_not

WHY_NOT_BFLOAT16 = why_not("bfloat16")

needs_bfloat16 = pytest.mark.skipif(
    WHY_NOT_BFLOAT16 is not None, reason=f"oneDNN multiplies no bfloat16 on this processor: {WHY_NOT_BFLOAT16}"
)
ONE_ORDER = "avx512f" in Path("/proc/cpuinfo").read_text()
needs_one_order = pytest.mark.skipif(
    not ONE_ORDER,
    reason="without AVX-512 oneDNN adds up in another order than products of few tokens do",
)
COMPUTED = ["float32"] if WHY_NOT_BFLOAT16 else ["float32", "bfloat16"]
DTYPES = ["float32", pytest.param("bfloat16", marks=needs_bfloat16)]


def fast_dtype() -> str:
    """What a real model is served in where a test is about something else: half the bytes where they are multiplied as
    they are. Elsewhere weights are cast to float32 and Paddle's own kernels compute, which are far slower."""
    return "bfloat16" if WHY_NOT_BFLOAT16 is None else "float32"
