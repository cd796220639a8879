"""HF's logits of random small configs, family by family, and engines over their weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from rollout_client.copying import move, slot_view, source_view
from rollout_client.protocol import Part
from tests.random_tensors import random_tensors
from weight_manager.families import manifest_for
from weight_manager.layout import Layout, make_layout, rank_views
from weight_manager.plan import place, prove
from weight_manager.stacks import stacks
from worker.config import WorkerConfig
from worker.engine.paddle_engine import PaddleEngine

FAMILY_FILES = Path(__file__).parent / "fixtures" / "families"
FAMILIES = sorted(path.stem for path in FAMILY_FILES.glob("*.safetensors"))
LENGTHS = (5, 19, 41)


@dataclass(frozen=True)
class FamilyCase:
    """One config, as save_pretrained writes it (scripts/make_family_fixtures.py).

    module, stored: names and shapes of the torch module's tensors, and of its file's. ids, logits: by length.
    """

    name: str
    config: dict[str, Any]
    module: dict[str, tuple[int, ...]]
    stored: dict[str, tuple[int, ...]]
    tensors: dict[str, np.ndarray]
    ids: dict[int, list[int]]
    logits: dict[int, np.ndarray]

    def longest(self, length: int) -> int:
        """The longest context to serve: longrope has two sets of frequencies, and HF goes by the sequence's length."""
        rope = self.config.get("rope_parameters") or {}
        trained = rope.get("original_max_position_embeddings", 64) if rope.get("rope_type") == "longrope" else 64
        return trained if length <= trained else 64

    def views(self, rank: int = 0, tp: int = 1, dtype: Any = "float32") -> dict[str, np.ndarray]:
        """What a rank reads after the torch module's tensors were pushed."""
        layout = make_layout(manifest_for(self.config, dtype), tp)
        parts = [Part(name, "float32", value.shape) for name, value in self.tensors.items()]
        prove([parts], layout)
        slot = bytearray(layout.slot_bytes)
        for copy in place(parts, layout):
            flat = self.tensors[parts[copy.part].name].reshape(-1)
            move(source_view(flat, copy), "float32", slot_view(memoryview(slot), copy), dtype)
        return rank_views(layout, rank, memoryview(slot).toreadonly())

    def engine(
        self,
        directory: Path,
        longest: int,
        *,
        rank: int = 0,
        tp: int = 1,
        sums: Any = None,
        dtype: Any = "float32",
        **settings: Any,
    ) -> PaddleEngine:
        """Bound to these weights. directory: an empty one, for config.json. settings: of WorkerConfig."""
        (directory / "config.json").write_text(json.dumps(self.config))
        sizes = {"max_batch": 8, "max_model_len": longest, "block_size": 4, "num_blocks": 64} | settings
        config = WorkerConfig(model_dir=directory, dtype=dtype, tp=tp, **sizes)
        engine = PaddleEngine(config, manifest_for(self.config, dtype), sums, rank)
        engine.allocate_kv()
        engine.bind(engine.prepare(self.views(rank, tp, dtype)))
        return engine


def family_cases(family: str) -> list[FamilyCase]:
    """All of a family."""
    with safe_open(FAMILY_FILES / f"{family}.safetensors", "numpy") as file:
        return [
            FamilyCase(
                name=f"{family}-{number}",
                config=case["config"],
                module={name: tuple(shape) for name, shape in case["module"].items()},
                stored={name: tuple(shape) for name, shape in case["stored"].items()},
                tensors=random_tensors(case["module"], case["seed"], unit_norms=family.startswith("gemma")),
                ids={n: file.get_tensor(f"{number}.ids.{n}").tolist() for n in LENGTHS},
                logits={n: file.get_tensor(f"{number}.logits.{n}") for n in LENGTHS},
            )
            for number, case in enumerate(json.loads(file.metadata()["cases"]))
        ]


def taken_apart(layout: Layout, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As the hub has them, by plain slicing."""
    apart: dict[str, np.ndarray] = {}
    known = stacks(layout.manifest)
    for name, value in tensors.items():
        if name not in known:
            apart[name] = value
            continue
        flat, at = value.reshape(-1), 0
        for member in known[name].members:
            shape = member.parameter.shape
            apart[member.parameter.name] = flat[at : at + int(np.prod(shape))].reshape(shape)
            at += int(np.prod(shape))
        assert at == flat.size
    return apart


def relative_gap(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
