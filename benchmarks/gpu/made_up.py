"""A model's directory without weights: config.json of its shape, and a tokenizer with a text for every id. And adapters
of it as PEFT saves them, with random weights.

``python -m benchmarks.gpu.made_up DIR [--model Qwen3-0.6B]``. What servers are measured on that answer with text.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from benchmarks.gpu.shapes import SHAPES
from weight_manager.families import manifest_for

MODEL = "Qwen3-0.6B"


def directory(path: Path, model: str = MODEL) -> Path:
    """Write it; returns `path`."""
    config = SHAPES[model]
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocabulary = {f"w{number:06d}": number for number in range(config["vocab_size"])}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return path


def adapter(path: Path, rank: int, seed: int, model: str = MODEL) -> Path:
    """Write one over all linears, in bfloat16; returns `path`."""
    rng, header, pieces, end = np.random.default_rng(seed), {}, [], 0
    matrices = [p for p in manifest_for(SHAPES[model], "bfloat16").parameters if p.name.endswith("_proj.weight")]
    for parameter in matrices:
        for half, shape in (("A", (rank, parameter.shape[1])), ("B", (parameter.shape[0], rank))):
            values = 0.01 * rng.standard_normal(shape, np.float32)
            piece = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
            name = f"base_model.model.{parameter.name.removesuffix('.weight')}.lora_{half}.weight"
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (end, end + len(piece))}
            pieces.append(piece)
            end += len(piece)
    path.mkdir(parents=True, exist_ok=True)
    told = json.dumps(header).encode()
    (path / "adapter_model.safetensors").write_bytes(b"".join((len(told).to_bytes(8, "little"), told, *pieces)))
    modules = sorted({parameter.name.split(".")[-2] for parameter in matrices})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.made_up", description=__doc__)
    parser.add_argument("path", type=Path, metavar="DIR")
    parser.add_argument("--model", choices=sorted(SHAPES), default=MODEL)
    args = parser.parse_args()
    directory(args.path, args.model)


if __name__ == "__main__":
    main()
