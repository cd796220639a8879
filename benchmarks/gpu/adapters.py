"""What adapters cost a step on this GPU: decode steps and prompts of the base, of one adapter, and of eight.

    python -m benchmarks.gpu.adapters [--shape Qwen3-0.6B] [--sequences 16,64] [--context 516] [--out OUT.json]

Adapters of rank 16 over all linears, or over q and v alone, in bfloat16. `device_ms` is what a decode step takes when
the next is launched while it runs, as the service does; `step_ms` is what `forward` and the wait for it take, with the
host's part. Rounds of all cases alternate; medians. Prompts: of 128 tokens, 2,048 in a step. Random weights; needs an
NVIDIA GPU and the `gpu` extra, no torch and no service.
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.gpu.decode import BLOCK, Bench
from benchmarks.gpu.report import add_out, report
from benchmarks.gpu.shapes import SHAPES
from weight_manager.adapters.plan import AdapterModule
from weight_manager.layout import Extent
from worker.adapters import AdapterTable
from worker.engine.base import NO_ADAPTERS, ForwardBatch

RANK, PROMPT, TOKENS, ROUNDS, STEPS = 16, 128, 2048, 9, 20
CASES = {  # epochs of the sequences, in turn
    "base": [0],
    "one": [1],
    "eight": list(range(1, 9)),
    "half_base": [0, 1],
    "one_of_q_and_v": [9],
}


class Adapted(Bench):
    """A decoder with a full cache and nine adapters, the last of q and v alone."""

    def __init__(self, shape: str, sequences: list[int], context: int) -> None:
        super().__init__(shape, sequences, context, {}, tokens=TOKENS)
        self.table = AdapterTable(self.sites, self.decoder.adapters)
        rng = np.random.default_rng(0)
        self.numbers = (rng.standard_normal(1 << 22, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        self.hold_ms = [self._hold(epoch) for epoch in range(1, 9)]

    def only(self, case: str) -> None:
        """Hold what the case needs and no more: what others would change costs launches."""
        if case == "one_of_q_and_v":
            for epoch in range(1, 9):
                self.table.forget(epoch)
            self._hold(9)

    def _hold(self, epoch: int) -> float:
        extents, modules, end = {}, [], 0
        for site in self.sites:
            for module, rows in zip(site.modules, site.rows, strict=True):
                if epoch == 9 and not module.endswith(("q_proj", "v_proj")):
                    continue
                modules.append(AdapterModule(module, RANK, 1e-3))
                for half, tensor in (("lora_A", (RANK, site.inputs)), ("lora_B", (rows, RANK))):
                    extents[f"{module}.{half}"] = Extent(end, tensor)
                    end += tensor[0] * tensor[1]
        plan = self.table.plan("a", extents, modules, "bfloat16")
        flat = np.resize(self.numbers, end)
        began = time.monotonic()
        self.table.hold(epoch, plan, flat)
        return round(1000 * (time.monotonic() - began), 2)

    def case(self, rows: int, case: str) -> ForwardBatch:
        """A decode step of the case's adapters."""
        return _of(self.batch(rows), case)

    def prompts(self, case: str) -> ForwardBatch:
        """Prompts of the case's adapters."""
        count, blocks = TOKENS // PROMPT, PROMPT // BLOCK
        tables = np.arange(1, count * blocks + 1, dtype=np.int32).reshape(count, blocks)
        positions = np.tile(np.arange(PROMPT, dtype=np.int32), count)
        owner = np.repeat(np.arange(count), PROMPT)
        batch = ForwardBatch(
            token_ids=np.random.default_rng(1).integers(0, self.model.vocab_size, TOKENS).astype(np.int32),
            positions=positions,
            slots=(tables[owner, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32),
            query_lens=np.full(count, PROMPT, np.int32),
            context_lens=np.full(count, PROMPT, np.int32),
            block_tables=tables,
            logits_rows=np.arange(PROMPT - 1, TOKENS, PROMPT, dtype=np.int32),
            block_copies=np.zeros((0, 2), np.int32),
        )
        return _of(batch, case)

    def seconds(self, batch: ForwardBatch, steps: int) -> float:
        """Wall seconds of a step, whole."""
        began = time.monotonic()
        for _ in range(steps):
            self.decoder.forward(batch)
            self.decoder.wait()
        return (time.monotonic() - began) / steps

    def device_seconds(self, batch: ForwardBatch) -> float:
        """The device's, of a step behind others, each with numbers of its own: a graph that is merely launched again
        finds what its blocks hand to each other there already.
        """
        self.decoder.forward(batch)
        self.decoder.wait()
        began = time.monotonic()
        for _ in range(STEPS):
            self.decoder.forward(batch)
        self.decoder.wait()
        return (time.monotonic() - began) / STEPS


def _of(batch: ForwardBatch, case: str) -> ForwardBatch:
    epochs = np.resize(np.array(CASES[case], np.int32), len(batch.query_lens))
    fields = {**vars(batch), "adapters": epochs if epochs.any() else NO_ADAPTERS}
    return ForwardBatch(**fields)


def _median(values: list[float]) -> float:
    return round(1000 * statistics.median(values), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen3-0.6B", choices=sorted(SHAPES))
    parser.add_argument("--sequences", default="16,64", help="numbers of sequences, with commas between")
    parser.add_argument("--context", type=int, default=516, help="tokens of each, the new one counted")
    add_out(parser)
    args = parser.parse_args()
    sizes = [int(n) for n in args.sequences.split(",")]
    bench = Adapted(args.shape, sizes, args.context)
    said: dict[str, Any] = {"device": bench.driver.name, "shape": args.shape, "hold_ms": bench.hold_ms}
    for cases in (["base", "one", "eight", "half_base"], ["base", "one_of_q_and_v"]):
        bench.only(cases[-1])
        for rows in (*sizes, 0):  # 0: prompts
            batches = {case: bench.case(rows, case) if rows else bench.prompts(case) for case in cases}
            wall: dict[str, list[float]] = {case: [] for case in cases}
            device: dict[str, list[float]] = {case: [] for case in cases}
            for round_ in range(ROUNDS + 1):
                for case, batch in batches.items():
                    seconds = bench.seconds(batch, STEPS if rows else 2)
                    if round_:
                        wall[case].append(seconds)
                        device[case] += [bench.device_seconds(batch)] if rows else []
            for case in cases:
                found = {"step_ms": _median(wall[case])}
                found |= {"device_ms": _median(device[case])} if rows else {}
                found["tokens_per_s"] = round((rows or TOKENS) / statistics.median(wall[case]))
                found["of_base"] = round(statistics.median(wall["base"]) / statistics.median(wall[case]), 3)
                if rows:
                    of_base = statistics.median(device["base"]) / statistics.median(device[case])
                    found["device_of_base"] = round(of_base, 3)
                name = f"{rows} sequences" if rows else "prompts"
                said.setdefault(name, {}).setdefault(case, found)
                print(args.shape, name, case, found, flush=True)
    report(said, args.out)


if __name__ == "__main__":
    main()
