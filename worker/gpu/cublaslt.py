"""cuBLASLt: y[T, n] (+)= x[T, k] @ w[n, k]^T, all row-major, sums in float32."""

import ctypes
from dataclasses import dataclass
from typing import Any

from worker.gpu.driver import U64, CudaError, Driver, Float, Handle, Int, Pointer, Size
from worker.gpu.libraries import load

_FLOAT32, _BFLOAT16 = 0, 14  # cudaDataType
_COMPUTE_FLOAT32 = 68  # without TF32
_TRANSPOSE_A = 3
_WORKSPACE_LIMIT = 1
_WORKSPACE = 64 << 20
_PROPOSALS = 8


@dataclass(frozen=True)
class Plan:
    """One of the library's proposals for a shape."""

    description: Pointer
    weight: Pointer
    rows: Pointer
    result: Pointer
    proposal: Any
    beta: Float


class CublasLt:
    """Plans by shape, and runs them. fp32: of weights and rows; results are float32 when wide."""

    def __init__(self, driver: Driver, *, fp32: bool) -> None:
        self._lib = load("libcublasLt.so.1[0-9]", "nvidia-cublas")
        self._lib.cublasLtGetVersion.restype = Size
        self.version = int(self._lib.cublasLtGetVersion())
        self._handle = Pointer()
        self._check(self._lib.cublasLtCreate(ctypes.byref(self._handle)))
        self._kind = _FLOAT32 if fp32 else _BFLOAT16
        self._workspace = driver.allocate(_WORKSPACE, "cuBLASLt's workspace")
        self._one = Float(1)
        self._plans: dict[tuple[int, int, int, bool, bool], list[Plan]] = {}

    def plans(self, n: int, k: int, tokens: int, *, add: bool, wide: bool) -> list[Plan]:
        """The library's proposals, the one it thinks best first. Raises CudaError when it has none."""
        key = (n, k, tokens, add, wide)
        if key not in self._plans:
            self._plans[key] = self._propose(*key)
        return self._plans[key]

    def run(self, plan: Plan, weight: int, x: int, y: int, stream: Handle) -> None:
        """Addresses of w, x and y."""
        self._check(
            self._lib.cublasLtMatmul(
                self._handle,
                plan.description,
                ctypes.byref(self._one),
                *(U64(weight), plan.weight, U64(x), plan.rows),
                ctypes.byref(plan.beta),
                *(U64(y), plan.result, U64(y), plan.result),
                ctypes.byref(plan.proposal.algorithm),
                *(U64(self._workspace), Size(_WORKSPACE), stream),
            )
        )

    def _propose(self, n: int, k: int, tokens: int, add: bool, wide: bool) -> list[Plan]:
        lib, kind, out = self._lib, self._kind, _FLOAT32 if wide else self._kind
        description, weight, rows, result, preference = (Pointer() for _ in range(5))
        self._check(lib.cublasLtMatmulDescCreate(ctypes.byref(description), _COMPUTE_FLOAT32, _FLOAT32))
        yes = Int(1)
        self._check(lib.cublasLtMatmulDescSetAttribute(description, _TRANSPOSE_A, ctypes.byref(yes), Size(4)))
        for layout, dtype, high, across in ((weight, kind, k, n), (rows, kind, k, tokens), (result, out, n, tokens)):
            self._check(
                lib.cublasLtMatrixLayoutCreate(
                    ctypes.byref(layout), dtype, U64(high), U64(across), ctypes.c_int64(high)
                )
            )
        self._check(lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        size = Size(_WORKSPACE)
        self._check(lib.cublasLtMatmulPreferenceSetAttribute(preference, _WORKSPACE_LIMIT, ctypes.byref(size), Size(8)))
        found, count = (_Proposal * _PROPOSALS)(), Int()
        status = lib.cublasLtMatmulAlgoGetHeuristic(
            *(self._handle, description, weight, rows, result, result, preference, _PROPOSALS, found),
            ctypes.byref(count),
        )
        lib.cublasLtMatmulPreferenceDestroy(preference)
        if status or not count.value:
            raise CudaError(f"cuBLASLt has no way to multiply [{tokens}, {k}] by [{n}, {k}]^T (status {status})")
        beta = Float(1 if add else 0)
        return [Plan(description, weight, rows, result, found[i], beta) for i in range(count.value)]

    def _check(self, status: int) -> None:
        if status:
            raise CudaError(f"cuBLASLt failed with status {status}")


class _Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", U64 * 8),
        ("workspace", Size),
        ("state", Int),
        ("waves", Float),
        ("reserved", Int * 4),
    )
