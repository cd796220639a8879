"""SGLang's /weights_checker: digests of what every rank holds, kept as a snapshot and compared with later ones.

SGLang keeps a copy of the tensors; here their xxh3-64 digests, which every rank computes from the bytes it serves from.
Replicas are copies of each other, so a snapshot has one digest per rank and parameter, and a replica that was restarted
or added since is compared like the others.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from api.control import Control
from api.errors import BadInput, Conflict

Found = dict[int, dict[str, dict[str, str]]]
"""replica -> rank -> parameter -> 16 hex digits, as `Control.verify` answers."""
SHOWN = 20
READ_ONLY = (
    "a reset would overwrite weights that are being served, to see whether an update brings them back. Here what "
    "is served is mapped read-only and never written to, by an update neither, so there is nothing that a reset could "
    "test: take a snapshot, push, and compare: that a push took effect shows in what differs, and every tensor was "
    "checked by its digest on every rank before it went live"
)


@dataclass(frozen=True)
class Snapshot:
    """Digests of (rank, parameter), and what the version was called."""

    version: str
    digests: dict[tuple[str, str], str]


@dataclass
class WeightChecks:
    """One snapshot at a time, of this process; a newer one replaces it, and it is lost with the process."""

    control: Control
    kept: Snapshot | None = field(default=None)

    async def snapshot(self, version: str) -> int:
        """Keep what is served now; how many digests that are. Raises Conflict if replicas differ or none answers."""
        found = await self._verify()
        digests: dict[tuple[str, str], str] = {}
        for replica, ranks in found.items():
            for rank, names in ranks.items():
                for name, digest in names.items():
                    if digests.setdefault((rank, name), digest) != digest:
                        raise Conflict(f"replica {replica} holds another {name} (rank {rank}) than the others")
        self.kept = Snapshot(version, digests)
        return len(digests)

    async def compare(self, skip: Sequence[str]) -> list[str]:
        """What differs from the snapshot anywhere, as dp<replica>:tp<rank>:<parameter>. Raises BadInput without one."""
        kept = self.kept
        if kept is None:
            raise BadInput("there is no snapshot to compare with: send action snapshot first")
        wrong = []
        for replica, ranks in (await self._verify()).items():
            held = {(rank, name): digest for rank, names in ranks.items() for name, digest in names.items()}
            wrong += [
                f"dp{replica}:tp{rank}:{name}"
                for rank, name in held.keys() | kept.digests.keys()
                if held.get((rank, name)) != kept.digests.get((rank, name)) and not skipped(name, skip)
            ]
        return sorted(wrong)

    async def checksums(self, skip: Sequence[str]) -> Found:
        """Digests of everything but what is skipped."""
        return {
            replica: {
                rank: {name: digest for name, digest in names.items() if not skipped(name, skip)}
                for rank, names in ranks.items()
            }
            for replica, ranks in (await self.control.verify()).items()
        }

    async def _verify(self) -> Found:
        found = await self.control.verify()
        if not any(names for ranks in found.values() for names in ranks.values()):
            raise Conflict("no replica holds weights now")
        return found


def skipped(name: str, skip: Sequence[str]) -> bool:
    """Whether any of the substrings is in the name."""
    return any(part in name for part in skip)


def per_rank(found: Found, tp: int) -> list[dict[str, Any]]:
    """SGLang's `ranks`: of each GPU its checksums, their sum, and where it stands."""
    dp_size = len(found)
    return [
        {
            "checksums": names,
            "per_gpu_checksum": _sum([text for name in sorted(names) for text in (name, names[name])]),
            "parallelism_info": [
                {
                    "role": "target",
                    "tp_rank": int(rank),
                    "tp_size": tp,
                    "dp_rank": dp_rank,
                    "dp_size": dp_size,
                    "pp_rank": 0,
                    "pp_size": 1,
                    "rank": dp_rank * tp + int(rank),
                    "size": dp_size * tp,
                }
            ],
        }
        for dp_rank, (_, ranks) in enumerate(sorted(found.items()))
        for rank, names in sorted(ranks.items(), key=lambda item: int(item[0]))
    ]


def per_engine(ranks: Sequence[dict[str, Any]]) -> str:
    """SGLang's `per_engine_checksum`: the sum of those of its GPUs."""
    return _sum([rank["per_gpu_checksum"] for rank in ranks])


def _sum(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()
