"""Tiny checkpoints on disk, and a hand that feeds an engine ragged steps: for every engine there is."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from weight_manager.adapters.plan import AdapterModule
from weight_manager.families import manifest_for
from weight_manager.layout import Extent, make_layout, piece, rank_views, region_views
from worker.engine.base import ForwardBatch

MODELS = Path(__file__).parent / "fixtures" / "models"
ADAPTERS = Path(__file__).parent / "fixtures" / "adapters"


def to_bits(x: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bits, round to nearest even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Checkpoint:
    """One HF directory laid out for tp ranks."""

    def __init__(self, path: Path, dtype: Any = "float32", tp: int = 1) -> None:
        self.path, self.dtype, self.tp = path, dtype, tp
        self.config = json.loads((path / "config.json").read_text())
        self.manifest = manifest_for(self.config, dtype)
        self.layout = make_layout(self.manifest, tp)
        self.tensors = load_file(path / "model.safetensors")

    def views(self, rank: int = 0, change: Callable[[np.ndarray], np.ndarray] | None = None) -> dict[str, np.ndarray]:
        slot = bytearray(self.layout.slot_bytes)
        for region, view in zip(self.layout.regions, region_views(self.layout, slot), strict=True):
            box = tuple(slice(s, s + n) for s, n in zip(region.start, region.shape, strict=True))
            piece = self.tensors[region.name][box].reshape(-1)
            piece = piece if change is None else change(piece)
            view[:] = piece if self.dtype == "float32" else to_bits(piece)
        return rank_views(self.layout, rank, memoryview(slot).toreadonly())


def in_one_array(views: dict[str, np.ndarray]) -> tuple[dict[str, Extent], np.ndarray]:
    """The views one after the other, and where each is."""
    starts = np.cumsum([0, *(view.size for view in views.values())]).tolist()
    extents = {name: Extent(start, view.shape) for (name, view), start in zip(views.items(), starts, strict=False)}
    return extents, np.concatenate([view.reshape(-1) for view in views.values()] or [np.zeros(0, np.float32)])


def hold_adapter(engine: Any, name: str, epoch: int, views: dict[str, np.ndarray], modules: Any, dtype: Any) -> None:
    extents, flat = in_one_array(views)
    engine.adapters.hold(epoch, engine.adapters.plan(name, extents, modules, dtype), flat)


class AdapterTensors:
    """An adapter of a checkpoint, and what one rank of tp gets of it."""

    def __init__(self, name: str, tensors: dict[str, np.ndarray], scale: Callable[[str], float], dtype: Any) -> None:
        """tensors: lora_A and lora_B of HF module names. scale: of a module."""
        self.name, self.tensors, self.dtype = name, tensors, dtype
        names = sorted({name.rsplit(".", 1)[0] for name in tensors})
        self.modules = [AdapterModule(name, len(tensors[f"{name}.lora_A"]), scale(name)) for name in names]

    def views(self, checkpoint: Checkpoint, rank: int = 0) -> dict[str, np.ndarray]:
        views: dict[str, np.ndarray] = {}
        for p in checkpoint.manifest.parameters:
            module = p.name.removesuffix(".weight")
            if f"{module}.lora_A" not in self.tensors:
                continue
            (rows, columns), (height, width) = piece(p, checkpoint.tp, rank)
            a, b = self.tensors[f"{module}.lora_A"], self.tensors[f"{module}.lora_B"]
            views[f"{module}.lora_A"] = np.ascontiguousarray(a[:, columns : columns + width])
            views[f"{module}.lora_B"] = np.ascontiguousarray(b[rows : rows + height])
        return views

    def into(self, engine: Any, epoch: int, checkpoint: Checkpoint, rank: int = 0) -> None:
        hold_adapter(engine, self.name, epoch, self.views(checkpoint, rank), self.modules, self.dtype)


def named_by_module(peft: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors as PEFT saves them, by HF module name."""
    return {name.removeprefix("base_model.model.").removesuffix(".weight"): tensor for name, tensor in peft.items()}


class Adapter(AdapterTensors):
    """A PEFT directory."""

    def __init__(self, path: Path, dtype: Any = "float32") -> None:
        self.config = json.loads((path / "adapter_config.json").read_text())
        tensors = named_by_module(load_file(path / "adapter_model.safetensors"))
        self._ranks = {name: len(tensor) for name, tensor in tensors.items()}
        stored = tensors if dtype == "float32" else {name: to_bits(t) for name, t in tensors.items()}
        super().__init__(path.name, stored, self._scale, dtype)
        self.expected = load_file(path / "expected.safetensors")

    def _scale(self, module: str) -> float:
        alphas = self.config["alpha_pattern"].items()
        alpha = next((a for key, a in alphas if re.fullmatch(rf"(.*\.)?{key}", module)), self.config["lora_alpha"])
        rank = self._ranks[f"{module}.lora_A"]
        return alpha / (rank**0.5 if self.config["use_rslora"] else rank)


class Feeder:
    """Runs sequences through an engine step by step, each with scattered blocks of its own."""

    def __init__(self, engine: Any, sequences: list[list[int]], seed: int = 0) -> None:
        self.engine, self.sequences = engine, sequences
        size = engine.spec.block_size
        free = np.random.default_rng(seed).permutation(engine.spec.num_blocks).tolist()
        self.tables = [[free.pop() for _ in range(-(-len(s) // size))] for s in sequences]
        self.done = [0] * len(sequences)
        self.logits: list[list[np.ndarray]] = [[] for _ in sequences]
        self.adapters = [0] * len(sequences)  # the epoch of each

    def step(
        self, counts: dict[int, int], copies: list[tuple[int, int]] | None = None, *, last_only: bool = False
    ) -> None:
        """Advance these sequences by that many tokens in one step; all rows' logits are kept, or only the last's."""
        size = self.engine.spec.block_size
        positions = {i: np.arange(self.done[i], self.done[i] + n) for i, n in counts.items()}
        slots = [self.tables[i][p // size] * size + p % size for i, ps in positions.items() for p in ps]
        width = max(len(self.tables[i]) for i in counts)
        tables = [self.tables[i] + [0] * (width - len(self.tables[i])) for i in counts]
        ends = np.cumsum(list(counts.values()))
        rows = ends - 1 if last_only else np.arange(ends[-1])
        logits = self.engine.forward(
            ForwardBatch(
                token_ids=_int32([self.sequences[i][p] for i, ps in positions.items() for p in ps]),
                positions=_int32(np.concatenate(list(positions.values()))),
                slots=_int32(slots),
                query_lens=_int32(list(counts.values())),
                context_lens=_int32([self.done[i] + n for i, n in counts.items()]),
                block_tables=_int32(tables),
                logits_rows=_int32(rows),
                block_copies=_int32(copies or []).reshape(-1, 2),
                adapters=_int32([self.adapters[i] for i in counts] if any(self.adapters) else []),
            )
        )
        row = 0
        for i, n in counts.items():
            kept = 1 if last_only else n
            if logits is not None:
                self.logits[i].extend(logits[row : row + kept].copy())  # the engine reuses its array
            row += kept
            self.done[i] += n

    def all_logits(self, sequence: int) -> np.ndarray:
        return np.stack(self.logits[sequence])


def _int32(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)
