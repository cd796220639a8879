"""A model's directory without weights: config.json of its shape, and a tokenizer with a text for every id.

``python -m benchmarks.gpu.made_up DIR [--model Qwen3-0.6B]``. What servers are measured on that answer with text.
"""

import argparse
import json
from pathlib import Path

from benchmarks.gpu.shapes import SHAPES

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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.made_up", description=__doc__)
    parser.add_argument("path", type=Path, metavar="DIR")
    parser.add_argument("--model", choices=sorted(SHAPES), default=MODEL)
    args = parser.parse_args()
    directory(args.path, args.model)


if __name__ == "__main__":
    main()
