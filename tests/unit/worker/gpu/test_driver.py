"""What a rank says when a device cannot be used. NVIDIA's library is a stand-in."""

import ctypes
import itertools
import json
import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

from worker.gpu import driver
from worker.gpu.driver import CudaError, DeviceMemoryError, Driver


class Cuda:
    """Everything works but what is named in `codes`."""

    def __init__(self, count=1, **codes):
        self.count, self.codes, self.device = count, codes, None

    def __getattr__(self, name):
        return lambda *_: self.codes.get(name, 0)

    def cuDeviceGetCount(self, out):  # noqa: N802
        out._obj.value = self.count
        return 0

    def cuDeviceGet(self, out, ordinal):  # noqa: N802
        out._obj.value = ordinal
        return 0

    def cuGetErrorName(self, code, out):  # noqa: N802
        out._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY" if code == 2 else b"CUDA_ERROR_NOT_FOUND"

    def cuMemGetInfo_v2(self, free, total):  # noqa: N802
        free._obj.value, total._obj.value = 3 << 30, 80 << 30
        return 0

    def cuDeviceGetName(self, out, length, device):  # noqa: N802
        out.value = b"NVIDIA H100 MIG 1g.10gb"
        return 0


@pytest.fixture
def cuda(monkeypatch):
    def install(*args, **codes):
        made = Cuda(*args, **codes)
        monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: made)
        return made

    return install


def test_a_host_without_visible_devices_is_told_where_to_look(cuda):
    cuda(0)
    with pytest.raises(CudaError, match="no GPU is visible here; see nvidia-smi and CUDA_VISIBLE_DEVICES"):
        Driver(0)


@pytest.mark.parametrize(("count", "taken"), [(1, [0, 0, 0]), (2, [0, 1, 0]), (8, [0, 1, 2])])
def test_ranks_take_the_devices_they_see_in_turn(cuda, count, taken):
    cuda(count)
    assert [Driver(rank).ordinal for rank in range(3)] == taken


def _start():
    one = Driver(0)
    one.allocate(5 << 30, "weights")
    driver.Module(one, b"")


@pytest.mark.parametrize("call", ["cuMemAlloc_v2", "cuDevicePrimaryCtxRetain", "cuModuleLoadData"])
def test_wherever_memory_is_short_it_is_said_what_needs_less(cuda, call):
    cuda(**{call: 2})
    with pytest.raises(DeviceMemoryError, match=r"worker\.num_blocks.*worker\.max_batch.*bfloat16"):
        _start()


def test_memory_of_the_host_is_another_matter(cuda):
    cuda(cuMemHostAlloc=2)
    with pytest.raises(DeviceMemoryError, match="no 16 bytes be pinned"):
        Driver(0).pinned(16, "u1")


def test_how_much_is_missing_is_said_too(cuda):
    cuda(cuMemAlloc_v2=2)
    said = r"no room on NVIDIA H100 MIG 1g\.10gb for 5\.00 GiB of logits: 3\.00 of 80\.00"
    with pytest.raises(DeviceMemoryError, match=said):
        Driver(0).allocate(5 << 30, "logits")


def test_a_launch_is_told_as_it_is_whatever_launches_of_the_kernel_came_before(cuda, monkeypatch):
    made, told, rooms = cuda(), [], []

    def launched(config, function, values, extra):
        of, cluster = config._obj, []
        for attribute in of.attributes[: of.count]:
            cluster += list(attribute.value[:3]) if attribute.id == driver._CLUSTER else []
        told.append(((of.grid_x, of.grid_y, of.grid_z), of.block_x, of.shared, of.stream, tuple(cluster)))
        told[-1] += tuple(ctypes.cast(values[i], ctypes.POINTER(driver.Int)).contents.value for i in range(2))
        return 0

    def room(function, attribute, value):
        rooms.extend([value] * (attribute == driver._SHARED_BYTES))
        return 0

    made.cuLaunchKernelEx, made.cuFuncSetAttribute = launched, room
    monkeypatch.setattr(driver, "_PREPARED", 20)
    module, streams = driver.Module(Driver(0), b""), (driver.Handle(7), driver.Handle(8))
    kinds = itertools.product([(3,), (3, 2)], [64, 128], streams, [1000, 2000], [(), (1, 2)])
    wanted = [(*kind, n) for n, kind in enumerate([*kinds] * 3)]
    for grid, threads, stream, shared, cluster, n in wanted:
        module.launch("a kernel", grid, threads, stream, [driver.Int(n), driver.Int(-n)], shared, cluster)
    assert told == [
        ((*grid, 1, 1)[:3], threads, shared, stream.value, (*cluster, 1) if cluster else (), n, -n)
        for grid, threads, stream, shared, cluster, n in wanted
    ]
    assert rooms == [1000, 2000], "a kernel's room only grows"


def test_a_rank_says_so_in_a_line_and_leaves(tmp_path):
    config = {"worker": {"model_dir": str(tmp_path), "engine": "tests.fake_engine:made"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    script = (
        "import sys; from pathlib import Path; from worker import boot\n"
        "from worker.gpu.driver import DeviceMemoryError\n"
        "def fail(*_): raise DeviceMemoryError('no room on the card')\n"
        "boot.build_loop = fail; sys.exit(boot.run_rank(Path(sys.argv[1]), 0, 0))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "config.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["message"] == "leaving: no room on the card"


@pytest.mark.parametrize(("code", "value", "beside"), [(0, 1, True), (0, 0, False), (1, 0, False)])
def test_kernels_of_other_processes_run_beside_ours_where_nvidias_service_says_so(cuda, code, value, beside):
    """An older driver does not know the question."""
    made = cuda()

    def answer(out, which, device):
        assert which == 133
        out._obj.value = value
        return code

    made.cuDeviceGetAttribute = answer
    assert Driver().beside_others is beside


def test_nothing_is_left_of_a_graph_that_the_device_has_no_room_for(cuda, monkeypatch):
    """Its first launch would be what finds that out, and the step would fail."""
    made, destroyed = cuda(1, cuGraphUpload=2), []
    monkeypatch.setattr(Driver, "drop", lambda self, graph: destroyed.append(graph))
    with pytest.raises(DeviceMemoryError):
        Driver(0).captured(None, lambda: None)
    assert len(destroyed) == 1
    made.codes.clear()
    assert Driver(0).captured(None, lambda: None) is not None
    assert len(destroyed) == 1


@pytest.fixture
def two_images(cuda, monkeypatch):
    """The first image that is loaded has a kernel called first, the second has the other."""
    one, images, has = cuda(1), itertools.count(1), {1: b"first", 2: b"second"}

    def load(out, image):
        out._obj.value = next(images)
        return 0

    def find(out, module, name):
        out._obj.value = module.value
        return 0 if has[module.value] == name else 500

    monkeypatch.setattr(one, "cuModuleLoadData", load, raising=False)
    monkeypatch.setattr(one, "cuModuleGetFunction", find, raising=False)


@pytest.mark.usefixtures("two_images")
def test_kernels_are_found_in_whichever_image_has_them():
    module = driver.Module(Driver(0), b"a", b"b")
    assert [module._function(name).value for name in ("second", "first")] == [2, 1]
    with pytest.raises(CudaError, match="NOT_FOUND"):
        module._function("third")


@pytest.mark.usefixtures("two_images")
def test_an_image_that_is_still_made_is_waited_for_where_its_kernels_are_asked_for():
    made = Future()
    module = driver.Module(Driver(0), b"a", made)
    assert module._function("first").value == 1
    threading.Timer(0.05, lambda: made.set_result(b"b")).start()
    assert module._function("second").value == 2
    with pytest.raises(CudaError, match="NOT_FOUND"):
        module._function("third")
    refused = Future()
    refused.set_exception(CudaError("the kernels do not compile for this device"))
    with pytest.raises(CudaError, match="do not compile"):
        driver.Module(Driver(0), refused).complete()
