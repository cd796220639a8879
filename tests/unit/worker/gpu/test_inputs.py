"""A step's numbers as a device gets them. The driver is a stand-in."""

import numpy as np
import pytest

from worker.engine.base import ForwardBatch
from worker.gpu.adapters import words
from worker.gpu.inputs import Inputs, tiles_of
from worker.gpu.products import tokens_padded

BASE = 1 << 40


class DriverThatKeeps:
    """Keeps what was carried last, too: it stands for device memory at BASE."""

    def allocate(self, nbytes, what):
        return BASE

    def pinned(self, shape, dtype):
        return np.zeros(shape, dtype)

    def event(self):
        return None

    def stream(self, *, urgent):
        return None

    def wait(self, _, *, event):
        pass

    def record(self, event, stream):
        pass

    def wait_event(self, stream, event):
        pass

    def __call__(self, address, source, stream, nbytes):
        assert address == BASE
        self.words = source[: nbytes // 4].copy()

    def within(self, address, source, stream, nbytes):
        assert address == source == BASE
        assert nbytes == self.words.nbytes

    def at(self, address, count):
        start = (address - BASE) // 4
        return self.words[start : start + count].tolist()


def _batch(lengths, contexts, rows, copies=()):
    lengths, contexts = np.array(lengths, np.int32), np.array(contexts, np.int32)
    positions = np.concatenate([np.arange(c - n, c) for n, c in zip(lengths, contexts, strict=True)]).astype(np.int32)
    tables = np.arange(len(lengths) * 3, dtype=np.int32).reshape(len(lengths), 3)
    return ForwardBatch(
        token_ids=np.arange(100, 100 + len(positions), dtype=np.int32),
        positions=positions,
        slots=positions + 7,
        query_lens=lengths,
        context_lens=contexts,
        block_tables=tables,
        logits_rows=np.array(rows, np.int32),
        block_copies=np.array(copies, np.int32).reshape(-1, 2),
    )


def test_a_decode_step_has_the_addresses_that_its_graph_holds_and_rows_beyond_it_are_nowhere():
    driver = DriverThatKeeps()
    inputs = Inputs(driver, driver, None, 64, 16, 8)
    step = inputs.decode(_batch([1, 1, 1], [5, 9, 2], [0, 1, 2], [(4, 6)]), 8)
    fixed = inputs.fixed(8)
    assert (step.tokens, step.positions, step.tables) == (fixed.tokens, fixed.positions, fixed.tables)
    assert driver.at(step.stride, 1) == [3]
    assert driver.at(step.tokens, 8) == [100, 101, 102, 0, 0, 0, 0, 0]
    assert driver.at(step.positions, 8) == [4, 8, 1, -1, -1, -1, -1, -1]
    assert driver.at(step.tables, 9) == list(range(9))
    assert step.copies is not None
    assert driver.at(step.copies[0], 2) == [4, 6]


def test_rows_that_attend_alone_and_tiles_of_those_that_do_not():
    driver = DriverThatKeeps()
    batch = _batch([1, 70, 1, 2], [4, 90, 8, 2], [0, 70, 71, 73])
    step = Inputs(driver, driver, None, 128, 8, 8).ragged(batch, 80, 64)
    assert step.singles is not None
    assert driver.at(*step.singles) == [0, 71, -1, -1]
    assert step.tiles is not None
    assert driver.at(step.tiles[0], 2 * step.tiles[1]) == [1, 64, 1, 0, 3, 0, -1, -1]  # the most to read first
    assert driver.at(step.starts, 5) == [0, 1, 71, 72, 74]
    assert driver.at(step.sequences, 74) == [0] + [1] * 70 + [2] + [3] * 2
    assert driver.at(step.slots, 80)[74:] == [-1] * 6
    every = Inputs(driver, driver, None, 128, 8, 8).ragged(batch, 80, 0)  # heads that no tile takes
    assert every.singles is not None
    assert driver.at(*every.singles) == [*range(74), *[-1] * 6]
    assert every.tiles is not None
    assert every.tiles[1] == 0


def test_steps_of_one_kind_have_their_numbers_at_the_same_addresses():
    driver = DriverThatKeeps()
    inputs = Inputs(driver, driver, None, 512, 8, 8)
    lists = np.zeros(words(512), np.int32)
    lists[1] = 48
    for adapters in (None, lists):
        steps = [
            inputs.ragged(batch, 320, 64, adapters)
            for batch in (
                _batch([1, 290, 1], [4, 300, 9], [291]),
                _batch([200, 1, 60, 1, 1, 1], [200, 8, 60, 2, 3, 4], range(6), [(1, 2)]),
            )
        ]
        assert steps[0].kind == steps[1].kind == (320, 4, 8, 0 if adapters is None else 64)
        addresses = [
            {name: value for name, value in vars(step).items() if name not in ("wanted", "copies")} for step in steps
        ]
        assert addresses[0] == addresses[1]
        ends = [start + 4 * step.rows for step in steps[:1] for start in (step.tokens, step.positions, step.slots)]
        assert ends == [steps[0].positions, steps[0].slots, steps[0].sequences]
        assert driver.at(steps[1].starts, 7) == [0, 200, 201, 261, 262, 263, 264]
        assert driver.at(steps[1].contexts, 6) == [200, 8, 60, 2, 3, 4]
        assert driver.at(steps[1].tables, 18) == list(range(18))


def test_there_is_room_for_the_largest_steps():
    driver = DriverThatKeeps()
    for tokens, sequences, tile in ((64, 64, 1), (64, 64, 0), (128, 3, 1), (128, 64, 64)):
        inputs = Inputs(driver, driver, None, tokens, sequences, 3)
        for lengths in (
            [1] * sequences,
            [tokens - sequences + 1] + [1] * (sequences - 1),
            [2] * min(sequences, tokens // 2),
        ):
            count = sum(lengths)
            copies = [(n, n + 1) for n in range(len(lengths))]
            batch = _batch(lengths, lengths, range(count), copies)
            step = inputs.ragged(batch, tokens, tile, np.zeros(words(tokens), np.int32) + 4)
            assert step.wanted is not None
            assert step.copies is not None
            assert driver.at(*step.wanted) == list(range(count))
            assert driver.at(step.copies[0], 2 * len(copies)) == [n for pair in copies for n in pair]


def test_no_long_row_no_tile():
    one = np.ones(3, np.int32)
    assert tiles_of(one, one, one > 1, 64).shape == (0, 2)


@pytest.mark.parametrize(("tokens", "padded"), [(1, 1), (16, 16), (17, 32), (250, 256), (257, 320), (8192, 8192)])
def test_rows_are_padded_to_few_sizes(tokens, padded):
    assert tokens_padded(tokens) == padded
