"""What being held to a grammar adds to drawing a step's tokens: the mask, its use, and following the token.

``python -m benchmarks.grammar [--rounds 9]`` prints JSON: for 16 sequences over SmolLM2's vocabulary the median
milliseconds of this thread a step, plain, held to a schema, and held to an expression that leaves almost every token.
Over HTTP, with everything else that a token costs: ``benchmarks.generate.grammar``.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from api.constraint import Constraint, Writer
from benchmarks.generate.grammar import JSON, TEXT
from worker.grammar import Compiled, Grammars
from worker.logit_edits import LogitEdits
from worker.messages import SamplingParams
from worker.sampler import Pick, Sampler
from worker.tokenizer import Tokenizer

MODEL = Path("models/SmolLM2-135M-Instruct")
VOCAB, ROWS, STEPS = 49152, 16, 40
CONSTRAINTS = {
    "plain": None,
    "schema": Constraint("json", JSON["json_schema"]),
    "wide expression": Constraint("regex", TEXT["regex"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    tokenizer = Tokenizer.load(MODEL)
    grammars = Grammars(tokenizer, VOCAB, tuple(tokenizer.ends))
    held = {name: compiled(grammars, tokenizer, constraint) for name, constraint in CONSTRAINTS.items()}
    logits = np.random.default_rng(0).standard_normal((4, ROWS, VOCAB), dtype=np.float32) * 3
    sampler = Sampler(VOCAB)
    times: dict[str, list[float]] = {name: [] for name in CONSTRAINTS}
    for _ in range(rounds):
        for name, grammar in held.items():
            times[name].append(a_step(sampler, logits, grammar) * 1e3)
    json.dump({name: round(statistics.median(seen), 3) for name, seen in times.items()}, sys.stdout, indent=2)
    sys.stdout.write("\n")
    grammars.close()


def compiled(grammars: Grammars, tokenizer: Tokenizer, constraint: Constraint | None) -> Compiled | None:
    if constraint is None:
        return None
    writer = Writer(lambda text: tokenizer.special_id(text) is not None)
    text = writer.written(writer.of(constraint))
    while (found := grammars.look_up(text)) is None:
        time.sleep(0.001)
    assert isinstance(found, Compiled), found
    return found


def a_step(sampler: Sampler, logits: np.ndarray, grammar: Compiled | None) -> float:
    """Median thread seconds of a step: 16 tokens drawn and followed."""
    sampling = SamplingParams(ignore_eos=True)
    of_all = grammar.of_request() if grammar is not None else None
    edits = [
        LogitEdits(sampling, [1], frozenset(), of_all.matcher(frozenset()) if of_all is not None else None)
        for _ in range(ROWS)
    ]
    took = []
    for step in range(STEPS):
        picks = [Pick(row, sampling, edit, 7, row, step) for row, edit in enumerate(edits)]
        start = time.thread_time()
        draws = sampler.sample(logits[step % len(logits)], picks)
        for edit, draw in zip(edits, draws, strict=True):
            assert not draw.error, draw.error
            edit.record(draw.token)
        took.append(time.thread_time() - start)
    return statistics.median(took)


if __name__ == "__main__":
    main()
