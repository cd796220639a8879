"""Page sums (page_sums.py) of CUDA tensors by torch's own kernels, where ours (cuda_hash.py) cannot be compiled."""

from collections.abc import Sequence
from typing import Any

from rollout_client.page_sums import PAGE, digest_of_sums, pages


class CudaSums:
    """As CudaHash, for other digests."""

    sums = True

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def start(self, tensors: Sequence[Any], stream: Any) -> "Summing":
        """Add up contiguous CUDA tensors on a stream, which is current; they stay as they are until it is through."""
        return Summing(self._torch, tensors)


class Summing:
    """Sums that are under way. It keeps what it reads alive."""

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

    def digests(self) -> list[int]:
        """Of each tensor's page sums. Once the stream has come so far."""
        sums, found, start = self._host.numpy(), [], 0
        for count in self._counts:
            found.append(digest_of_sums(sums[start : start + count]))
            start += count
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
