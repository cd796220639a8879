"""What LoRA adapters cost, and the same of vLLM's CPU build.

    python -m benchmarks.generate.adapters --dtype float32 --targets all [--peer vllm] [--rounds 5] [--within 230]

SmolLM2-135M, 16 sequences of 32 prompt tokens and 96 new ones, temperature 1, logprob of every token: on the base, on
one adapter of rank 16, and on 8 of them in turn. targets: `all` linears of a layer, or q and v (`qv`), which is what
PEFT adapts of such a model when nothing is said. Adapters are random and float32. In a round each side runs every case
once, with prompts never seen before; who is first turns from round to round, and ratios are taken within a round. What
does not fit into `--within` seconds, the start included, is left to the next call.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save_file

from benchmarks.generate import install
from benchmarks.generate.contenders import Contender, Job, contest, in_turn
from benchmarks.generate.rounds import Round, Section, arguments
from benchmarks.generate.servers import Service, VllmServer

RANK, COUNT, SEQUENCES, PROMPT, NEW_TOKENS, WARM_TOKENS = 16, 8, 16, 32, 96, 8
TARGETS = {
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "qv": ("q_proj", "v_proj"),
}
BLOCKS = 1024
"""Of KV cache: more than these sequences need, and soon filled in."""
NAMES = [f"adapter-{i}" for i in range(COUNT)]
CASES: dict[str, list[str]] = {"base": [], "one": NAMES[:1], "eight": NAMES}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--targets", choices=list(TARGETS), default="all")
    parser.add_argument("--peer", choices=["vllm"])
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds for all of it, the start included")
    args = parser.parse_args()
    name = "/".join(filter(None, ("adapters", args.dtype, args.targets, args.peer)))
    section = Section(args.out, name, args.rounds, args.budget, args.within)
    if not section.lacking:
        return
    with tempfile.TemporaryDirectory(prefix="bench-adapters-") as scratch, contest() as (contenders, logs):
        directories = [
            _write(Path(scratch) / name, args.model, TARGETS[args.targets], i) for i, name in enumerate(NAMES)
        ]
        if args.peer == "vllm":
            modules = [f"{name}={path}" for name, path in zip(NAMES, directories, strict=True)]
            limits = (
                "--enable-lora",
                "--max-loras",
                str(COUNT),
                "--max-lora-rank",
                str(RANK),
                "--lora-modules",
                *modules,
            )
            contenders.append(VllmServer(install.vllm(), args.model, args.dtype, logs / "vllm.log", 512, *limits))
        words = "--set", f'store.disk_roots=["{scratch}"]', "--set", f"worker.num_blocks={BLOCKS}"
        service = Service("service", args.model, args.dtype, logs / "service.log", *words).settle()
        contenders.append(service)
        for name, path in zip(NAMES, directories, strict=True):
            body = {"lora_name": name, "lora_path": str(path)}
            httpx.post(f"{service.url}/v1/load_lora_adapter", json=body, timeout=60.0).raise_for_status()
        random = np.random.default_rng()
        one_round(contenders, random, 0, WARM_TOKENS)
        section.collect(lambda number: one_round(contenders, random, number, NEW_TOKENS))


def one_round(contenders: list[Contender], random: np.random.Generator, number: int, new: int) -> Round:
    """Every case on every contender: tokens per second."""
    took: Round = {case: {} for case in CASES}
    for case in [*CASES][number % len(CASES) :] + [*CASES][: number % len(CASES)]:
        job = Job(random.integers(1000, 40000, (SEQUENCES, PROMPT)).tolist(), 1, new)
        for contender in in_turn(contenders, number):
            assert isinstance(contender, Service | VllmServer)
            took[case][contender.name] = round(contender.run(job, CASES[case]), 1)
    return took


def _write(into: Path, model: Path, targets: tuple[str, ...], seed: int) -> Path:
    """A random adapter as PEFT saves one."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    kv = config["num_key_value_heads"] * dim
    shapes = {"q_proj": (heads * dim, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
    shapes |= {"o_proj": (hidden, heads * dim), "gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
    shapes |= {"down_proj": (hidden, inner)}
    random = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}
    for layer in range(config["num_hidden_layers"]):
        for target in targets:
            where = "self_attn" if target[0] in "qkvo" else "mlp"
            name = f"base_model.model.model.layers.{layer}.{where}.{target}"
            rows, columns = shapes[target]
            for half, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
                tensors[f"{name}.{half}.weight"] = 0.01 * random.standard_normal(shape, dtype=np.float32)
    into.mkdir(parents=True)
    save_file(tensors, into / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    settings |= {"target_modules": list(targets), "base_model_name_or_path": str(model)}
    (into / "adapter_config.json").write_text(json.dumps(settings))
    return into


if __name__ == "__main__":
    main()
