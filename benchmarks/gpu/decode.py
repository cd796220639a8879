"""Where a decode step's time goes on this GPU: the whole step, each kind of kernel alone, and the step without it.

    python -m benchmarks.gpu.decode [--sequences 1,16,64,256] [--context 516] [--out OUT.json]

A part alone is a graph of its launches over all layers' own weights, so that no cache holds them; `without` is what the
step takes less when they are left out, which is what they cost beside the rest. Bytes: of weights and of the KV cache.
Random weights in bfloat16; needs an NVIDIA GPU and the `gpu` extra, no torch and no service.
"""

import argparse
import ctypes
import json
import logging
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.report import add_out, report
from benchmarks.gpu.shapes import SHAPES
from weight_manager.families import decoder_spec, manifest_for
from weight_manager.layout import make_layout
from worker.engine.base import ForwardBatch
from worker.gpu.backend import GpuDecoder
from worker.gpu.driver import U64, Driver, Handle, Pointer, Size
from worker.gpu.operations import Heads, Operations
from worker.gpu.weights import DeviceSlots, placement
from worker.models.packed_adapter import sites_of
from worker.models.shard import shard_of

BLOCK, ISSUE_TBPS, POOL = 16, 3.0, 1 << 25
ROUNDS, REPLAYS = 7, 10


class Parts:
    """Stands before a decoder's launches and passes on those of the parts that are wanted."""

    def __init__(self, operations: Operations) -> None:
        self.passes: Callable[[str], bool] = lambda part: True
        self.launched: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self._product = ""
        launch, product, library = operations._launch, operations.product, operations._machine.library
        run = library.run

        def may(part: str) -> bool:
            self.launched[part] += 1
            return self.passes(part)

        def counted_product(kind: str, weight: Any, *rest: Any, **more: Any) -> None:
            self._product = f"{kind} {weight.shape[0]}x{weight.shape[1]}"
            self.nbytes[self._product] += 2 * weight.shape[0] * weight.shape[1]
            product(kind, weight, *rest, **more)
            self._product = ""

        def counted_launch(name: str, *rest: Any, **more: Any) -> None:
            own = not self._product or name in {"rms_norm", "gated"}
            if may(name if own else self._product):
                launch(name, *rest, **more)

        def counted_run(*rest: Any) -> None:
            if may(self._product):
                run(*rest)

        operations.product, operations._launch, library.run = counted_product, counted_launch, counted_run


class Bench:
    """A decoder with random weights and a full cache."""

    def __init__(
        self, shape: str, sequences: list[int], context: int, ways: dict[str, str], tokens: int | None = None
    ) -> None:
        """ways: of products, taken instead of timing them. tokens: the most of a step, if not those of `sequences`."""
        config, most = SHAPES[shape], max(sequences)
        model, layout = decoder_spec(config), make_layout(manifest_for(config, "bfloat16"), 1)
        self.model, self.context, self.blocks = model, context, -(-context // BLOCK)
        self.driver, self.heads = Driver(), Heads(model.heads, model.kv_heads, model.head_dim)
        self.slots = DeviceSlots(self.driver, placement(layout, 0))
        self.slots.regions[0].fill()
        self.sites = sites_of(layout.manifest, shard_of(model, layout.manifest, 0, 1))
        self.decoder = GpuDecoder(
            *(self.driver, model, self.heads, self.slots),
            fp32=False,
            max_tokens=tokens or most,
            max_batch=most,
            max_len=context + BLOCK,
            block_size=BLOCK,
            num_blocks=most * self.blocks + 1,
            sizes=sequences,
            sites=self.sites,
        )
        self.decoder.allocate_kv()
        self.stream = self.decoder._stream
        self._fill()
        self.decoder.operations._machine.choices._ways.update(ways)
        for size in sequences:
            self.decoder._choose(size)
        self.slots.bound = 0
        self.parts = Parts(self.decoder.operations)

    def _fill(self) -> None:
        pool = np.random.default_rng(0).standard_normal(POOL, dtype=np.float32)
        bits = (pool.view(np.uint32) >> 16).astype(np.uint16)
        small = ((pool * np.float32(0.03)).view(np.uint32) >> 16).astype(np.uint16)
        for name, tensor in self.decoder.tensors(0).items():
            count = int(np.prod(tensor.shape))
            values = np.full(count, 0x3F80, np.uint16) if name.endswith("norm.weight") else np.resize(small, count)
            self.decoder.put(tensor.address, values)
        kv = self.decoder._kv
        self.decoder.put(kv.address, bits[: kv.nbytes // 2])
        done = min(bits.nbytes, kv.nbytes)
        while done < kv.nbytes:
            size = min(done, kv.nbytes - done)
            self._copy(kv.address + done, kv.address, size)
            done += size

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        self.driver.call("cuMemcpyDtoDAsync_v2", U64(to), U64(source), Size(nbytes), self.stream)

    def batch(self, rows: int) -> ForwardBatch:
        rng = np.random.default_rng(rows)
        tables = (rng.permutation(rows * self.blocks) + 1).astype(np.int32).reshape(rows, self.blocks)
        last = self.context - 1
        return ForwardBatch(
            token_ids=rng.integers(0, self.model.vocab_size, rows).astype(np.int32),
            positions=np.full(rows, last, np.int32),
            slots=(tables[:, last // BLOCK] * BLOCK + last % BLOCK).astype(np.int32),
            query_lens=np.ones(rows, np.int32),
            context_lens=np.full(rows, self.context, np.int32),
            block_tables=tables,
            logits_rows=np.arange(rows, dtype=np.int32),
            block_copies=np.zeros((0, 2), np.int32),
        )

    def milliseconds(self, graph: Handle) -> float:
        """A replay's, the median of rounds."""
        start, end = self.driver.event(timing=True), self.driver.event(timing=True)
        times = []
        for round_ in range(ROUNDS + 1):
            self.driver.record(start, self.stream)
            for _ in range(REPLAYS):
                self.driver.launch(graph, self.stream)
            self.driver.record(end, self.stream)
            times += [self.driver.milliseconds(start, end) / REPLAYS] * (round_ > 0)
        return statistics.median(times)

    def timed(self, rows: int, passes: Callable[[str], bool]) -> float:
        """Of a step of these parts alone."""
        self.parts.passes = passes
        graph = self.driver.captured(self.stream, lambda: self.decoder.record(0, rows))
        found = self.milliseconds(graph)
        self.driver.drop(graph)
        return found

    def edges(self, rows: int) -> dict[str, int]:
        """Dependencies between the captured launches, by kind: a programmatic one lets the second begin early."""
        self.parts.passes = lambda part: True
        graph, count = Pointer(), Size()
        self.driver.call("cuStreamBeginCapture_v2", self.stream, 1)
        self.decoder.record(0, rows)
        self.driver.call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        self.driver.call("cuGraphGetEdges_v2", graph, None, None, None, ctypes.byref(count))
        ends, data = [(Pointer * count.value)() for _ in range(2)], (ctypes.c_ubyte * 8 * count.value)()
        self.driver.call("cuGraphGetEdges_v2", graph, *ends, data, ctypes.byref(count))
        self.driver.call("cuGraphDestroy", graph)
        return dict(Counter("programmatic" if edge[2] else "full" for edge in data))

    def step(self, rows: int) -> dict[str, Any]:
        """The report for one number of sequences."""
        self.decoder.forward(self.batch(rows))
        self.decoder.wait()
        self.parts.launched.clear()
        self.parts.nbytes.clear()
        whole = self.timed(rows, lambda part: True)
        launched, nbytes = dict(self.parts.launched), dict(self.parts.nbytes)
        head = 4 * self.model.kv_heads * self.model.head_dim  # bytes of a token's keys and values in a layer
        nbytes["turn_and_attend"] = rows * self.context * head * self.model.layers
        limit = sum(nbytes.values()) / ISSUE_TBPS / 1e9
        parts = {}
        for part, launches in launched.items():
            alone = self.timed(rows, lambda name, part=part: name == part)
            without = whole - self.timed(rows, lambda name, part=part: name != part)
            parts[part] = {
                "launches": launches,
                "ms": round(alone, 4),
                "us_each": round(1000 * alone / launches, 2),
                "without_ms": round(without, 4),
                "TBps": round(nbytes.get(part, 0) / alone / 1e9, 2),
            }
        return {
            "ms": round(whole, 4),
            "of_3_TBps": round(limit / whole, 3),
            "TBps": round(sum(nbytes.values()) / whole / 1e9, 3),
            "edges": self.edges(rows),
            "parts": parts,
        }

    def copy_tbps(self) -> float:
        """Bytes read and written by a copy within the device, in TB/s."""
        kv = self.decoder._kv
        half, best = kv.nbytes // 2, float("inf")
        start, end = self.driver.event(timing=True), self.driver.event(timing=True)
        for _ in range(5):
            self.driver.record(start, self.stream)
            self._copy(kv.address, kv.address + half, half)
            self.driver.record(end, self.stream)
            best = min(best, self.driver.milliseconds(start, end))
        return round(2 * half / best / 1e9, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen3-0.6B", choices=sorted(SHAPES))
    parser.add_argument("--sequences", default="1,16,64,256", help="numbers of sequences, with commas between")
    parser.add_argument("--context", type=int, default=516, help="tokens of each, the new one counted")
    parser.add_argument("--steps-only", action="store_true", help="whole steps, without their parts")
    parser.add_argument("--ways", type=Path, help="JSON of an earlier run, whose ways of products are taken")
    add_out(parser)
    parser.add_argument("--verbose", action="store_true", help="log every way of every product as it is timed")
    args = parser.parse_args()
    logging.basicConfig(level=logging.DEBUG if args.verbose else logging.WARNING, format="%(message)s")
    sizes = [int(n) for n in args.sequences.split(",")]
    ways = json.loads(args.ways.read_text())["ways"] if args.ways else {}
    bench = Bench(args.shape, sizes, args.context, ways)
    copy = bench.copy_tbps()
    said: dict[str, Any] = {"device": bench.driver.name, "copy_TBps": copy, "shape": args.shape}
    for rows in sizes:
        if args.steps_only:
            bench.decoder.forward(bench.batch(rows))
            bench.decoder.wait()
            found = {"ms": round(bench.timed(rows, lambda part: True), 4)}
        else:
            found = bench.step(rows)
        said[str(rows)] = found
        print(rows, "sequences:", {key: value for key, value in found.items() if key != "parts"}, flush=True)
        for name, part in found.get("parts", {}).items():
            print(f"  {name:24}", part, flush=True)
    said["ways"] = bench.decoder.operations._machine.choices._ways
    report(said, args.out)


if __name__ == "__main__":
    main()
