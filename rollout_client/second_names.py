"""Memory that has two names in a trainer's state dict is sent once."""

from collections.abc import Sequence

from rollout_client.tensors import Source


def tied_once(held: list[Source], tied: Sequence[str]) -> list[Source]:
    """The sources without second names, among those of tied tensors, for the same memory: the store would refuse the
    push for them, and count and report a failure where there is none.
    """
    once = {id(source) for source in sent_once([s for s in held if s.part.name in tied], tied)}
    return [source for source in held if source.part.name not in tied or id(source) in once]


def sent_once(held: Sequence[Source], named: Sequence[str]) -> list[Source]:
    """The sources without those, among the tensors named, that are the same memory as an earlier one."""
    seen: set[object] = set()
    kept = []
    for source in held:
        if source.key in seen and source.part.name in named:
            continue
        seen.add(source.key)
        kept.append(source)
    return kept
