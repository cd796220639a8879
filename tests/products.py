"""What this processor computes in oneDNN's and our compiled products; tests of what it does not are skipped, aloud.

Without AVX-512 oneDNN multiplies no bfloat16: engines compute with float32 copies of such weights. And it adds float32
up in orders that our products of few tokens do not have: `deterministic auto` is off there.
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
MULTIPLIED = ["float32", pytest.param("bfloat16", marks=needs_bfloat16)]
"""Dtypes of oneDNN's own products."""
