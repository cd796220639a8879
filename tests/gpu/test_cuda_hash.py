from typing import Any

import numpy as np
import pytest

from rollout_client import cuda_copy
from rollout_client.cuda_hash import CudaHash, CudaSums
from rollout_client.digest import PIECE, digest_of
from rollout_client.page_sums import digest_of_sums, page_sums
from rollout_client.publisher import WeightPublisher
from tests.faults import small_model

torch = pytest.importorskip("torch")

SIZES = [
    *(1, 2, 3, 8, 15, 16, 17, 128, 129, 200, 240, 241, 242, 255, 256, 257, 1023, 1024, 1025, 1088, 1089, 2048, 2049),
    *(4096, 65536, 65537, 65538, 70000, 1 << 20, (1 << 20) + 2),
    *(PIECE - 2, PIECE, PIECE + 1, PIECE + 2, PIECE + 242, 2 * PIECE, 3 * PIECE + 122),
]


@pytest.fixture(scope="module")
def memory() -> Any:
    return np.random.default_rng(0).integers(0, 256, 4 * PIECE, dtype=np.uint8)


@pytest.mark.parametrize("shift", [0, 8, 2])
def test_digests_of_the_gpu_are_those_of_the_cpu(device: Any, memory: Any, shift: int):
    on_gpu = torch.from_numpy(memory).to(device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        started = CudaHash(torch).start([on_gpu[shift : shift + size] for size in SIZES], stream)
    stream.synchronize()
    assert started.digests(0, len(SIZES)) == [digest_of(memory[shift : shift + size].data) for size in SIZES]


def test_page_sums_of_the_gpu_are_those_of_the_cpu(device: Any, memory: Any):
    on_gpu = torch.from_numpy(memory).to(device)
    started = CudaSums(torch).start([on_gpu[2 : 2 + size] for size in SIZES], torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert started.digests(0, len(SIZES)) == [digest_of_sums(page_sums(memory[2 : 2 + size])) for size in SIZES]


def test_a_torch_that_compiles_nothing_pushes_with_page_sums(
    publisher: WeightPublisher, device: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    tensors = {name: torch.from_numpy(array).to(device) for name, array in small_model.weights(7).items()}
    expected = publisher.push(tensors, 1).digest
    assert not caplog.records
    publisher._link.shm._cuda._digesters.clear()
    publisher._link.shm._cuda._before = None

    def refuse(_: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cuda_copy, "CudaHash", refuse)
    assert publisher.push(tensors, 2).digest == expected
    assert publisher.push(tensors, 3).digest == expected
    assert [r.message for r in caplog.records].count(caplog.records[0].message) == 1
    assert "no compiler" in caplog.records[0].message
