"""What prompts, and steps that mix them with decoding, take on this GPU: by the host's clock, and on the device alone.

    python -m benchmarks.gpu.mixed [--shape Qwen3-0.6B] [--out OUT.json]

`step_ms` is `forward` and the wait for it, logits of each sequence's last token included; `launch_ms` is `forward`
alone, which is the host's part; `device_ms` is what the layers take as one graph, without the host. Of the base, and
with an adapter of rank 16 over all linears. Random weights in bfloat16; needs an NVIDIA GPU and the `gpu` extra.
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.gpu.adapters import Adapted
from benchmarks.gpu.decode import BLOCK
from benchmarks.gpu.report import add_out, report
from benchmarks.gpu.shapes import SHAPES
from worker.engine.base import NO_ADAPTERS, ForwardBatch
from worker.gpu.products import tokens_padded
from worker.models.decoder import hidden

SEQUENCES, LONGEST, CONTEXT, ROUNDS, STEPS = 64, 1024, 516, 7, 8
CASES = {  # new tokens of prompts, and how many sequences decode beside them
    "16 prompts of 128": ([128] * 16, 0),
    "2 prompts of 1,024": ([1024] * 2, 0),
    "a prompt of 512": ([512], 0),
    "a prompt of 128": ([128], 0),
    "a prompt of 192 beside 63": ([192], 63),
    "a prompt of 960 beside 63": ([960], 63),
}


class Mixed(Adapted):
    """Steps of prompts, and of prompts beside sequences whose cache is full."""

    def mixed(self, prompts: list[int], singles: int, epoch: int) -> ForwardBatch:
        """Every sequence has blocks of its own; all have the adapter, or none."""
        rng = np.random.default_rng(len(prompts) + singles)
        new = np.array([1] * singles + prompts, np.int32)
        contexts = np.array([CONTEXT] * singles + prompts, np.int32)
        width, free = -(-int(contexts.max()) // BLOCK), rng.permutation(SEQUENCES * self.blocks) + 1
        tables, used = np.zeros((len(new), width), np.int32), 0
        for line, context in zip(tables, contexts.tolist(), strict=True):
            count = -(-context // BLOCK)
            line[:count], used = free[used : used + count], used + count
        owner = np.repeat(np.arange(len(new)), new)
        positions = np.concatenate([np.arange(c - n, c) for n, c in zip(new, contexts, strict=True)]).astype(np.int32)
        return ForwardBatch(
            token_ids=rng.integers(0, self.model.vocab_size, len(positions)).astype(np.int32),
            positions=positions,
            slots=(tables[owner, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32),
            query_lens=new,
            context_lens=contexts,
            block_tables=tables,
            logits_rows=(np.cumsum(new) - 1).astype(np.int32),
            block_copies=np.zeros((0, 2), np.int32),
            adapters=np.full(len(new), epoch, np.int32) if epoch else NO_ADAPTERS,
        )

    def times(self, batch: ForwardBatch) -> tuple[float, float]:
        """Milliseconds (of a step, of its launches)."""
        began, launching = time.perf_counter(), 0.0
        for _ in range(STEPS):
            launched = time.perf_counter()
            self.decoder.forward(batch)
            launching += time.perf_counter() - launched
            self.decoder.wait()
        return 1000 * (time.perf_counter() - began) / STEPS, 1000 * launching / STEPS

    def device(self, batch: ForwardBatch) -> float:
        """Milliseconds of the layers alone, as a graph."""
        decoder, rows = self.decoder, tokens_padded(len(batch.token_ids))
        step = decoder._inputs.ragged(batch, rows, decoder._tile, decoder.adapters.lists(batch, rows))
        decoder.operations.begin(step)
        graph = self.driver.captured(self.stream, lambda: hidden(decoder.operations, decoder.spec, decoder._weights[0]))
        found = self.milliseconds(graph)
        self.driver.drop(graph)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen3-0.6B", choices=sorted(SHAPES))
    add_out(parser)
    args = parser.parse_args()
    bench = Mixed(args.shape, [SEQUENCES], LONGEST)
    said: dict[str, Any] = {"device": bench.driver.name, "shape": args.shape}
    batches = {
        (case, who): bench.mixed(*sizes, epoch)
        for case, sizes in CASES.items()
        for who, epoch in (("base", 0), ("one adapter", 1))
    }
    found: dict[Any, list[tuple[float, float]]] = {key: [] for key in batches}
    for round_ in range(ROUNDS + 1):
        for key, batch in batches.items():
            times = bench.times(batch)
            found[key] += [times] if round_ else []
    for (case, who), batch in batches.items():
        steps, launches = zip(*found[case, who], strict=True)
        row = {
            "step_ms": round(statistics.median(steps), 3),
            "launch_ms": round(statistics.median(launches), 3),
            "device_ms": round(bench.device(batch), 3),
            "tokens_per_s": round(1000 * len(batch.token_ids) / statistics.median(steps)),
        }
        said.setdefault(case, {})[who] = row
        print(args.shape, case, who, row, flush=True)
    report(said, args.out)


if __name__ == "__main__":
    main()
