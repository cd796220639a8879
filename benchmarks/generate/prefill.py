"""Seconds to the first token of a long prompt, of the service and of vLLM's CPU build.

    python -m benchmarks.generate.prefill --dtype float32 [--rounds 5] [--budget 270]

Two layers of SmolLM2-135M's sizes with random weights and positions for 32,768 tokens: the time of a layer is what is
compared, and a prompt of 16,384 tokens on all thirty would take minutes a round. One prompt at a time, of 2,048, 8,192
and 16,384 tokens never seen before, one new token, HTTP included, both cores for each side. Who is first turns from
round to round, and the ratio is taken within the round.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.generate import install
from benchmarks.generate.contenders import Contender, Job, contest, in_turn
from benchmarks.generate.rounds import Round, Section, arguments, machine
from benchmarks.generate.servers import Service, VllmServer
from weight_manager.families import manifest_for

LENGTHS = (2048, 8192, 16384)
LAYERS, POSITIONS = 2, 32768
OURS = "service"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    args = parser.parse_args()
    section = Section(args.out, f"prefill/{args.dtype}", args.rounds, args.budget)
    if not section.lacking:
        return
    with tempfile.TemporaryDirectory(prefix="bench-generate-model-") as scratch, contest() as (contenders, logs):
        model = long_model(args.model, Path(scratch))
        contenders.append(VllmServer(install.vllm(), model, args.dtype, logs / "vllm.log", max_len=POSITIONS))
        contenders.append(Service(OURS, model, args.dtype, logs / "service.log").settle())
        random = np.random.default_rng()
        one_round(contenders, random, 0, LENGTHS[:1])
        section.note(machine=machine())
        section.collect(lambda number: one_round(contenders, random, number, LENGTHS))


def one_round(contenders: list[Contender], random: np.random.Generator, number: int, lengths: tuple[int, ...]) -> Round:
    """Seconds of every length on every contender."""
    took: Round = {}
    for length in lengths:
        job = Job(random.integers(1000, 40000, (1, length)).tolist(), 1, 1)
        took[str(length)] = {
            contender.name: round(1 / contender.run(job), 3) for contender in in_turn(contenders, number)
        }
    return took


def long_model(like: Path, into: Path) -> Path:
    """A checkpoint of fewer layers and more positions than `like`, its weights random."""
    config = json.loads((like / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "max_position_embeddings": POSITIONS}
    (into / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (into / name).write_bytes((like / name).read_bytes())
    random = np.random.default_rng(0)
    weights = {
        spec.name: np.ones(spec.shape, np.float32)
        if spec.name.endswith("norm.weight")
        else random.standard_normal(spec.shape, np.float32) * np.float32(0.02)
        for spec in manifest_for(config, "float32").parameters
    }
    save_file(weights, into / "model.safetensors", {"format": "pt"})
    return into


if __name__ == "__main__":
    main()
