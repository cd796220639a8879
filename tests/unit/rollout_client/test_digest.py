import numpy as np
import pytest
import xxhash

from rollout_client.digest import PIECE, Digest, digest_of, joined, pieces

SIZES = [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 5]


def content(size):
    return np.arange(-(-size // 8), dtype="<u8").view(np.uint8)[:size]


def test_golden():
    """On the wire and on disk: a change is another protocol and another layout."""
    assert PIECE == 16 << 20
    assert digest_of(b"abc") == xxhash.xxh3_64_intdigest(b"abc") == 0x78AF5F94892F3950
    words = np.array([xxhash.xxh3_64_intdigest(content(PIECE).data), 0], "<u8")
    words[1] = xxhash.xxh3_64_intdigest(content(PIECE + 1)[PIECE:].data)
    assert digest_of(content(PIECE + 1).data) == xxhash.xxh3_64_intdigest(words.tobytes()) == 0xE1EDAF9258AA83E0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("block", [PIECE // 3 + 1, PIECE, 3 * PIECE])
def test_block_by_block_is_the_same(size, block):
    raw = memoryview(content(size))
    state = Digest()
    for start in range(0, size, block):
        state.update(raw[start : start + block])
    assert state.intdigest() == digest_of(raw)
    assert joined([xxhash.xxh3_64_intdigest(piece) for piece in pieces(raw)]) == digest_of(raw)


@pytest.mark.parametrize("size", SIZES[2:])
def test_every_byte_counts(size):
    raw = content(size).copy()
    before = digest_of(raw.data)
    for where in (0, size // 2, size - 1):
        raw[where] ^= 1
        assert digest_of(raw.data) != before
        raw[where] ^= 1
