"""Counter-based random numbers."""

import numpy as np
import pytest

from worker.random_streams import philox, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the generator's published known answers
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    c0, c1, c2, c3, k0, k1 = (np.array([word], np.uint64) for word in (*counter, *key))
    assert tuple(int(word[0]) for word in philox((c0, c1, c2, c3), (k0, k1))) == words


def test_a_number_depends_on_its_own_coordinates_only() -> None:
    alone = [
        float(uniforms([seed], [sample], [at])[0]) for seed in (1, 2**64 - 1, -5) for sample in (0, 3) for at in (0, 7)
    ]
    together = uniforms(
        [seed for seed in (1, 2**64 - 1, -5) for _ in range(4)], [0, 0, 3, 3] * 3, [0, 7, 0, 7] * 3
    ).tolist()
    assert together == alone
    assert len(set(alone)) == 12


def test_uniform() -> None:
    numbers = uniforms([7] * 20000, [0] * 20000, list(range(20000)))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    chi_square = float(((counts - 400) ** 2 / 400).sum())
    assert 25 < chi_square < 85  # 49 degrees of freedom, 0.999 both sides
