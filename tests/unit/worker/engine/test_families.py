"""Every family against HF's logits at random configs, however a sequence comes in, on every backend."""

from pathlib import Path

import pytest

from tests.engine_cases import Feeder
from tests.family_cases import FAMILIES, LENGTHS, family_cases, relative_gap

BACKENDS = ["native", "mkl", "paddle"]
CLOSE = 2e-5

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.parametrize("backend", BACKENDS, indirect=True)]


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_hf(family: str, number: int, tmp_path: Path) -> None:
    case = family_cases(family)[number]
    for length in LENGTHS:
        ids, expected = case.ids[length], case.logits[length]
        for way in (_whole, _token_by_token, _in_chunks_beside_another):
            run = Feeder(case.engine(tmp_path, case.longest(length)), [ids, ids[::-1]])
            way(run, length)
            assert relative_gap(run.all_logits(0), expected) < CLOSE, (case.name, length, way.__name__)


def _whole(run: Feeder, length: int) -> None:
    run.step({0: length})


def _token_by_token(run: Feeder, length: int) -> None:
    run.step({0: 2, 1: 1})
    while run.done[0] < length:
        run.step({0: 1})


def _in_chunks_beside_another(run: Feeder, length: int) -> None:
    """Rows of all kinds in one step, blocks that windows begin in and end in."""
    chunk = 3
    while run.done[0] < length:
        counts = {0: min(chunk, length - run.done[0])}
        if run.done[1] < length:
            counts[1] = min(1 + chunk % 3, length - run.done[1])
        run.step(counts)
        chunk = chunk % 7 + 3


def test_longrope_says_which_frequencies_all_contexts_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A short sequence has HF's logits where short contexts are served, and others where longer ones are."""
    case = next(c for c in family_cases("phi3") if c.config["rope_parameters"]["rope_type"] == "longrope")
    found = {}
    for longest in (16, 64):
        caplog.clear()
        run = Feeder(case.engine(tmp_path, longest), [case.ids[5]])
        run.step({0: 5})
        found[longest] = run.all_logits(0)
        assert ("up to 64 tokens" in caplog.text and "max_model_len 16" in caplog.text) == (longest > 16)
    assert relative_gap(found[16], case.logits[5]) < CLOSE
    assert relative_gap(found[64], case.logits[5]) > CLOSE
