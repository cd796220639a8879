"""xxh3-64 of a GPU's own memory, computed there: the digest of a push that the store finds in the slot again.

xxh3 of one run of bytes is a chain, but not from byte to byte: within a block of 1 KiB its 128 products are only added
up, in any order, and what follows the block before is one addition and one scramble. So a thread block of the GPU takes
one piece of 16 MiB (digest.py): eight warps reduce blocks of it to eight words each, and one warp runs the chain over
those. A piece takes about a third of a millisecond, and a GPU has room for hundreds of them at once.

Pieces of up to 240 bytes, for which xxh3 has other rules, are only fetched and are hashed here.
"""

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import xxhash

from rollout_client.digest import PIECE, joined
from rollout_client.page_sums import PAGE, digest_of_sums, pages

TINY = 240
"""Bytes up to which xxh3 has rules of its own, which the kernel does not have."""
_KNOWN = 64
"""Launches whose pieces are kept for the next push."""
_WARPS, _PER_WARP = 8, 8
THREADS = 32 * (_WARPS + 1)
"""Threads of a block of the kernel `xxh3`; there is a block for each piece."""
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2, _P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P64_4, _P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _words(start: int, count: int, step: int) -> str:
    words = (struct.unpack_from("<Q", _SECRET, start + step * n)[0] for n in range(count))
    return ", ".join(f"{word:#x}ull" for word in words)


SOURCE = f"""
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;
__constant__ u64 KEY[24] = {{{_words(0, 24, 8)}}};
__constant__ u64 LAST[8] = {{{_words(121, 8, 8)}}};
__constant__ u64 MERGE[8] = {{{_words(11, 8, 8)}}};
__constant__ u64 START[8] = {{{_P32_3:#x}ull, {_P64_1:#x}ull, {_P64_2:#x}ull, {_P64_3:#x}ull,
                             {_P64_4:#x}ull, {_P32_2:#x}ull, {_P64_5:#x}ull, {_P32_1:#x}ull}};

__device__ u64 unaligned(const u8 *p) {{
  u64 word = 0;
  for (int n = 7; n >= 0; n--) word = word << 8 | p[n];
  return word;
}}
__device__ u64 product(u64 word, u64 key) {{ word ^= key; return (word & 0xffffffffull) * (word >> 32); }}
__device__ u64 scrambled(u64 acc, u64 key) {{ return (acc ^ acc >> 47 ^ key) * {_P32_1:#x}ull; }}
__device__ u64 folded(u64 a, u64 b) {{ return a * b ^ __umul64hi(a, b); }}

// table: [count][2] address and bytes. out: [count]. tiny: [count][{TINY}]. One thread block for each piece.
extern "C" __global__ void xxh3(const u64 *table, u64 *out, u8 *tiny) {{
  const u8 *bytes = (const u8 *)table[2 * blockIdx.x];
  const u64 length = table[2 * blockIdx.x + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, word = lane % 8, stripe = lane / 8;
  if (length <= {TINY}) {{
    if (threadIdx.x < length) tiny[{TINY}ull * blockIdx.x + threadIdx.x] = bytes[threadIdx.x];
    return;
  }}
  __shared__ u64 sums[2][{_WARPS * _PER_WARP}][8];
  const u64 blocks = (length - 1) / 1024;
  const int rounds = (int)((blocks + {_WARPS * _PER_WARP - 1}) / {_WARPS * _PER_WARP});
  const u64 scramble = KEY[16 + word];
  u64 key[4];
  for (int n = 0; n < 4; n++) key[n] = KEY[stripe + 4 * n + word];
  u64 acc = START[word];
  for (int round = 0; round <= rounds; round++) {{
    if (warp > 0 && round < rounds) {{
      const u64 first = (u64)round * {_WARPS * _PER_WARP} + (warp - 1) * {_PER_WARP};
      u64 data[{_PER_WARP}][4];
#pragma unroll
      for (int b = 0; b < {_PER_WARP}; b++)
#pragma unroll
        for (int n = 0; n < 4; n++)
          data[b][n] = first + b < blocks ? ((const u64 *)bytes)[(first + b) * 128 + n * 32 + lane] : 0;
#pragma unroll
      for (int b = 0; b < {_PER_WARP}; b++) {{
        u64 own = 0, other = 0;
#pragma unroll
        for (int n = 0; n < 4; n++) {{ own += product(data[b][n], key[n]); other += data[b][n]; }}
        own += __shfl_xor_sync(~0u, other, 1);
        own += __shfl_xor_sync(~0u, own, 8);
        own += __shfl_xor_sync(~0u, own, 16);
        if (lane < 8) sums[round & 1][(warp - 1) * {_PER_WARP} + b][lane] = own;
      }}
    }}
    if (warp == 0 && round > 0) {{
      const u64 first = (u64)(round - 1) * {_WARPS * _PER_WARP};
      const int here = (int)(blocks - first < {_WARPS * _PER_WARP} ? blocks - first : {_WARPS * _PER_WARP});
#pragma unroll 8
      for (int b = 0; b < here; b++) acc = scrambled(acc + sums[round - 1 & 1][b][word], scramble);
    }}
    __syncthreads();
  }}
  if (warp > 0) return;
  const int stripes = (int)((length - 1 - 1024 * blocks) / 64);
  u64 own = 0, other = 0;
  for (int n = stripe; n < stripes; n += 4) {{
    const u64 data = *(const u64 *)(bytes + 1024 * blocks + 64 * n + 8 * word);
    own += product(data, KEY[n + word]);
    other += data;
  }}
  if (stripe == 0) {{
    const u64 data = unaligned(bytes + length - 64 + 8 * word);
    own += product(data, LAST[word]);
    other += data;
  }}
  own += __shfl_xor_sync(~0u, other, 1);
  own += __shfl_xor_sync(~0u, own, 8);
  own += __shfl_xor_sync(~0u, own, 16);
  acc = acc + own ^ MERGE[word];
  const u64 pair = __shfl_xor_sync(~0u, acc, 1);
  u64 sum = lane < 8 && lane % 2 == 0 ? folded(acc, pair) : 0;
  for (int n = 1; n < 8; n *= 2) sum += __shfl_xor_sync(~0u, sum, n);
  if (lane == 0) {{
    sum += length * {_P64_1:#x}ull;
    sum = (sum ^ sum >> 37) * 0x165667919e3779f9ull;
    out[blockIdx.x] = sum ^ sum >> 32;
  }}
}}
"""


class CudaHash:
    """The compiled kernel, on the device that is current when it is made and used. Making it raises whatever torch
    raises where it cannot be made.
    """

    sums = False  # digests are of the bytes themselves

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._kernel = torch.cuda._compile_kernel(SOURCE, "xxh3")
        self._known: dict[tuple[tuple[int, int], ...], _Pieces] = {}

    def start(self, tensors: Sequence[Any], stream: Any) -> "Hashing":
        """Hash contiguous CUDA tensors on a stream, which is current; they stay as they are until it is through, and
        the digests are read before the same are hashed again.
        """
        kept = [t.clone() if t.data_ptr() % 8 else t for t in tensors]  # words must lie on their own boundary
        return self.start_at(tuple((t.data_ptr(), t.numel() * t.element_size()) for t in kept), stream, kept)

    def start_at(self, spans: tuple[tuple[int, int], ...], stream: Any, kept: Sequence[Any] = ()) -> "Hashing":
        """The same for what lies there: (address, on a word's boundary, and bytes) of each. kept: is read meanwhile."""
        pieces = self._known.get(spans)  # from push to push they lie where they were
        if pieces is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            pieces = self._known[spans] = _Pieces(self._torch, spans)
        args = [pieces.table, pieces.out, pieces.tiny]
        self._kernel(grid=(len(pieces.rows), 1, 1), block=(THREADS, 1, 1), args=args, stream=stream)
        return Hashing(pieces, kept)


class _Pieces:
    """What the kernel is told of tensors at these places, and where it answers: (address, bytes) of each."""

    def __init__(self, torch: Any, spans: Sequence[tuple[int, int]]) -> None:
        self.rows: list[tuple[int, int]] = []
        self.ends: list[int] = []
        for address, nbytes in spans:
            self.rows += [(address + start, min(PIECE, nbytes - start)) for start in range(0, nbytes, PIECE)]
            self.ends.append(len(self.rows))
        self.table = torch.tensor(self.rows, dtype=torch.int64).pin_memory()
        self.out = torch.empty(len(self.rows), dtype=torch.int64, pin_memory=True)
        self.tiny = torch.empty(TINY * len(self.rows), dtype=torch.uint8, pin_memory=True)


class Hashing:
    """Digests that are being computed. Keeps the tensors alive that are read."""

    def __init__(self, pieces: _Pieces, kept: Sequence[Any]) -> None:
        self._pieces, self._kept = pieces, kept

    def digests(self, start: int, stop: int) -> list[int]:
        """The digest of each of these tensors, as digest.py says, once the stream has come so far."""
        pieces = self._pieces
        ends = [0, *pieces.ends][start : stop + 1]
        first = ends[0]
        out, tiny = pieces.out[first : ends[-1]].tolist(), pieces.tiny.numpy()
        for row, (_, nbytes) in enumerate(pieces.rows[first : ends[-1]], first):
            if nbytes <= TINY:
                out[row - first] = xxhash.xxh3_64_intdigest(tiny[TINY * row :][:nbytes].tobytes())
        return [joined([n % (1 << 64) for n in out[a - first : b - first]]) for a, b in pairwise(ends)]


class CudaSums:
    """Sums on the device, where `CudaHash` computes xxh3."""

    sums = True

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def start(self, tensors: Sequence[Any], stream: Any) -> "Summing":
        """Add up contiguous CUDA tensors on a stream, which is current; they stay as they are until it is through."""
        return Summing(self._torch, tensors)


class Summing:
    """Sums that are being computed. Keeps the tensors alive that are read."""

    def __init__(self, torch: Any, tensors: Sequence[Any]) -> None:
        self._torch = torch
        self._kept = [t.clone() if t.data_ptr() % 8 else t for t in tensors]  # words must lie on their own boundary
        self._counts = [pages(t.numel() * t.element_size()) for t in self._kept]
        total = sum(self._counts)
        self._sums = torch.empty(total, dtype=torch.int64, device=tensors[0].device)
        start = 0
        for tensor, count in zip(self._kept, self._counts, strict=True):
            self._add_up(tensor, self._sums[start : start + count])
            start += count
        self._host = torch.empty(total, dtype=torch.int64, pin_memory=True)
        self._host.copy_(self._sums, non_blocking=True)

    def digests(self, start: int, stop: int) -> list[int]:
        """The digest of each of these tensors' page sums, once the stream has come so far."""
        sums, found, at = self._host.numpy(), [], sum(self._counts[:start])
        for count in self._counts[start:stop]:
            found.append(digest_of_sums(sums[at : at + count]))
            at += count
        return found

    def _add_up(self, tensor: Any, sums: Any) -> None:
        torch = self._torch
        raw = tensor.view(-1).view(torch.uint8)
        whole = raw.numel() // PAGE * PAGE
        if whole:
            torch.sum(raw[:whole].view(torch.int64).view(-1, PAGE // 8), dim=1, out=sums[: whole // PAGE])
        if whole == raw.numel():
            return
        rest = raw[whole:]
        if rest.numel() % 8:
            padded = torch.zeros(PAGE, dtype=torch.uint8, device=raw.device)
            padded[: rest.numel()] = rest
            rest = padded
        torch.sum(rest.view(torch.int64).view(1, -1), dim=1, out=sums[-1:])
