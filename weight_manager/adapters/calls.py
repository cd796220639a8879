"""What is asked for of adapters, but for pushes: load a directory that PEFT saved, unload, go back, merge.

Each is told once how it went, by `done`; not after it has raised PushRefused.
"""

import functools
import json
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np

from rollout_client.copying import WIRE_DTYPE, move, slot_view, source_view
from rollout_client.peft import AdapterConfig, adapter_config, adapter_tensors
from rollout_client.protocol import AdapterPush, Part
from weight_manager.adapters.line import Line
from weight_manager.adapters.lines import Lines
from weight_manager.adapters.merge import merge
from weight_manager.adapters.plan import AdapterPlanner, in_trainers_terms
from weight_manager.background import Background
from weight_manager.checkpoint import Tensor, TensorFile, below_roots
from weight_manager.config import StoreConfig
from weight_manager.coordinator import Coordinator
from weight_manager.disk import Loaded, Loading
from weight_manager.errors import CheckpointError, PushRefused
from weight_manager.history import Intent
from weight_manager.layout import Layout
from weight_manager.messages import LoadAdapter, MergeAdapter, RollbackAdapter, UnloadAdapter
from weight_manager.own_sessions import DiskLoad, Outcome, RollbackToPrevious, named
from weight_manager.plan import place, prove

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG = 1 << 20
"""Largest adapter_config.json in bytes: the store's loop reads it."""
Done = Callable[[Outcome], None]


class AdapterCalls:
    """Owned by the store's loop."""

    def __init__(self, config: StoreConfig, model: Coordinator, lines: Lines, files: Background) -> None:
        """model: of the model's own weights."""
        self._config = config
        self._model = model
        self._lines = lines
        self._files = files

    def load(self, request: LoadAdapter, done: Done) -> None:
        """Make a directory the adapter's next version. Raises PushRefused, also for what is wrong with the
        directory.
        """
        self._model.check_root()
        directory = below_roots(request.path, (*self._config.disk_roots, self._config.model), (CONFIG, WEIGHTS))
        config, parts = read_head(directory)
        line = self._lines.for_push(AdapterPush(request.name, config), parts)
        known = next((one for one in self._lines.live if one.name == request.name), None)
        live = known.live if known is not None else None
        run_id, version = named(request.run_id, request.version, live)
        intent = Intent(
            *(run_id, version, "disk", str(directory), request.in_flight, "disk", request.force), adapter=line.name
        )
        load = DiskLoad(line.coordinator, self._files, done, self._config.patience(request.deadline_s))
        load.start(
            intent, functools.partial(read_adapter, directory, self._lines.planner, line.layout), time.monotonic()
        )

    def unload(self, request: UnloadAdapter, done: Callable[[PushRefused | None], None]) -> None:
        """Raises PushRefused unknown_adapter, or busy while it is pushed."""
        self._model.check_root()
        self._lines.unload(request.name, time.monotonic() + self._config.patience(request.deadline_s), done)

    def rollback(self, request: RollbackAdapter, done: Done) -> None:
        """Make the version that was live before live again, from the slot that still holds it. Raises PushRefused."""
        self._model.check_root()
        line: Line = self._lines.at_rest(request.name)
        owner = RollbackToPrevious(line.coordinator, done, self._config.patience(request.deadline_s))
        owner.start(request.in_flight, time.monotonic())

    def merge(self, request: MergeAdapter, done: Done) -> None:
        """The model's next version: its weights with the adapter's changes in them. Raises PushRefused busy,
        stale_version, unknown_adapter, or base_mismatch when weights without an adapter are not kept.
        """
        model, line = self._model, self._lines.find(request.name)
        model.check_root()
        base, live, adapter = model.history.without_adapters, model.history.live, line.history.live
        assert adapter is not None
        if live is None or base is None:
            message = (
                "the live version has an adapter merged into it, and the weights without it are not kept: push the "
                "model's own weights first"
            )
            raise PushRefused("base_mismatch" if live else "not_ready", message if live else "nothing is live yet")
        run_id, version = named(adapter.run_id if request.run_id is None else request.run_id, request.version, live)
        client = f"adapter {line.name} version {adapter.version}"
        intent = Intent(run_id, version, "merge", client, request.in_flight, "disk")
        held = line.coordinator.slots

        def over(outcome: Outcome) -> None:
            held.leave(adapter.slot)
            done(outcome)

        arena, reading = model.slots.arena, (line.shape, line.layout, line.arena.slot(adapter.slot))
        reader = functools.partial(merge, model.layout, arena.slot(base.slot), *reading)
        load = DiskLoad(model, self._files, over, self._config.patience(request.deadline_s))
        load.start(intent, reader, time.monotonic())
        held.enter(adapter.slot)  # not given away before the sum is made
        for slot in range(arena.slots):
            model.slots.back(slot)  # the next merge finds both taken: what is live, and what it starts from


def read_head(directory: Path) -> tuple[AdapterConfig, list[Part]]:
    """What a directory that PEFT saved says of itself. Raises CheckpointError."""
    path = directory / CONFIG
    try:
        config = adapter_config(json.loads(_small_file(path)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    file = TensorFile(directory / WEIGHTS)
    try:
        return config, [part for part, _ in _tensors(file)]
    finally:
        file.close()


def read_adapter(
    directory: Path, planner: AdapterPlanner, layout: Layout, slot: memoryview, loading: Loading
) -> Loaded:
    """Fill a slot (a `disk.Reader`). Raises PlanError or CheckpointError listing tensors, before a byte moves."""
    file = TensorFile(directory / WEIGHTS)
    try:
        tensors = _tensors(file)
        parts = [part for part, _ in tensors]
        pieces = planner.pieces(parts)
        prove([[piece.part for piece in pieces]], layout)
        copies = in_trainers_terms(place([piece.part for piece in pieces], layout), pieces)
        digests: list[int] = []
        for number, group in groupby(copies, key=lambda copy: copy.part):
            loading.goes_on()
            part, tensor = tensors[number]
            raw = np.empty(tensor.nbytes, np.uint8)
            file.read_into(raw.data, tensor.offset, loading.goes_on)
            flat = raw.view(WIRE_DTYPE[part.dtype])
            digests += [move(source_view(flat, c), part.dtype, slot_view(slot, c), c.dst_dtype) for c in group]
    finally:
        file.close()
    return Loaded(copies, [parts[copy.part].name for copy in copies], digests)


def _small_file(path: Path) -> bytes:
    """Raises OSError, and ValueError for what is too large, or would have to be waited for, as a pipe."""
    if not path.is_file():
        raise ValueError("there is no such file")
    with path.open("rb") as file:
        data = file.read(MAX_CONFIG + 1)
    if len(data) > MAX_CONFIG:
        raise ValueError(f"it has more than {MAX_CONFIG} bytes")
    return data


def _tensors(file: TensorFile) -> list[tuple[Part, Tensor]]:
    """A's and B's of a file, by the names that are served."""
    try:
        named = adapter_tensors([(tensor.part.name, tensor) for tensor in file.tensors()])
    except ValueError as error:
        raise CheckpointError(f"{file.path}: {error}") from error
    return [(msgspec.structs.replace(tensor.part, name=name), tensor) for name, tensor in named]
