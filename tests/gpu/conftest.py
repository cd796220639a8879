"""A real store and real CUDA tensors; skipped where there is no torch or no device."""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from rollout_client.publisher import WeightPublisher
from tests.faults import small_model
from tests.faults.store_process import Store
from weight_manager.arena import ArenaReader
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout, region_digests, version_digest
from worker.gpu.driver import CudaError, Driver
from worker.gpu.pinned import Pinned


@pytest.fixture(scope="session")
def device() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


@pytest.fixture(scope="module")
def driver() -> Driver:
    """The engine's own way to a device, without torch."""
    try:
        return Driver()
    except CudaError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _unpinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines of a test are dropped as they are. What they have pinned, the driver would take for pinned still when the
    next test's arrays lie there, and refuse to copy to an array of which it knows a part.
    """
    made: list[Pinned] = []
    init = Pinned.__init__

    def noted(self: Pinned, driver: Driver) -> None:
        made.append(self)
        init(self, driver)

    monkeypatch.setattr(Pinned, "__init__", noted)
    yield
    for pinned in made:
        pinned.let_go()


@pytest.fixture(params=[("float32", 1), ("bfloat16", 1), ("float32", 2)], ids=lambda p: f"{p[0]}-tp{p[1]}")
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    dtype, tp = request.param
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(small_model.CONFIG))
    save_file(small_model.weights(0), model / "model.safetensors")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as arena:  # the driver pins no pages of a disk's file system
        store = Store(tmp_path / "run", model, Path(arena), dtype=dtype, tp=tp, lease_s=10.0)
        store.status()  # answers once it is up
        yield store
        store.close()


@pytest.fixture
def served(store: Store, request: pytest.FixtureRequest) -> Callable[[], tuple[int | None, str]]:
    """(live version, digest of the bytes in its slot, read here and now)."""
    dtype, tp = request.node.callspec.params["store"]
    layout = make_layout(manifest_for(small_model.CONFIG, dtype), tp)

    def read() -> tuple[int | None, str]:
        status = store.status()
        (path,) = store.arena_dir.glob("*.arena")
        with ArenaReader(path) as reader:
            digests = region_digests(layout, reader.slot(status.live.slot))
        return status.live.version, version_digest(layout, digests)

    return read


@pytest.fixture
def publisher(store: Store, device: Any) -> Iterator[WeightPublisher]:
    with WeightPublisher(store.endpoint, run_id="gpu", transport="shm") as publisher:
        yield publisher


@pytest.fixture
def ranks() -> Iterator[Callable[..., Any]]:
    """Makes replicas whose ranks share a model; skipped without as many devices."""
    from tests.gpu.tp_replica import Ranks, need_devices

    need_devices()
    made: list[Any] = []

    def make(**config: Any) -> Any:
        made.append(Ranks(**config))
        return made[-1]

    yield make
    for one in made:
        if one.run_dir.exists():
            print(one.said[-3000:], flush=True)
        one.stop()
