"""Names and layouts of a trainer -> those that are served: rename, transpose, split, leave out.

    to_hf = Mapping(
        Rule(r"llama\\.(.*_proj\\.weight)", r"model.\\1", transpose=True),      # Paddle's Linear is [in, out]
        Rule(r"llama\\.(.*)", r"model.\\1"),
        Rule(r".*rotary_emb.*", ()),
    )
    publisher.push(to_hf(model.state_dict()), version=7)

Nothing is copied here: pieces are views, and a transposed view is read in order when its bytes are moved. That read
is slower than a copy (0.1 to 1 GB/s), so a trainer that can keep [out, in] should.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_client.tensors import Named, Slice, named_items


@dataclass(frozen=True)
class Rule:
    """What becomes of the tensors whose whole name matches.

    pattern: regular expression. to: the served name, which may refer to the pattern's groups (``\\1``); several names
    to split the tensor; none to leave it out. transpose: swap the two axes of a matrix first.
    sizes, axis: of a split, the served length of each piece on this axis, after transposing; () = equal pieces.
    groups: the axis holds this many units one after the other, each with a part of every piece (attention fused per
    KV head: q, k, v, q, k, v, ...); sizes are still those of whole pieces.
    """

    pattern: str
    to: str | Sequence[str]
    transpose: bool = False
    sizes: tuple[int, ...] = ()
    axis: int = 0
    groups: int = 1

    @property
    def names(self) -> Sequence[str]:
        """Templates of the served names."""
        return (self.to,) if isinstance(self.to, str) else self.to


class Mapping:
    """Applies the first rule that matches; names that none matches stay as they are."""

    def __init__(self, *rules: Rule) -> None:
        """Raises re.error for a pattern that is none, ValueError for sizes that do not fit the names."""
        self._rules = [(re.compile(rule.pattern), rule) for rule in rules]
        for rule in rules:
            if (rule.sizes and len(rule.sizes) != len(rule.names)) or rule.groups < 1:
                raise ValueError(
                    f"{rule.pattern}: {len(rule.names)} names, {len(rule.sizes)} sizes, {rule.groups} groups"
                )

    def __call__(self, named: Named) -> Iterator[tuple[str, Any]]:
        """Served names and tensors or slices, as `WeightPublisher.push` takes them.

        Raises ValueError naming the tensor that a rule does not fit.
        """
        for name, value in named_items(named):
            for pattern, rule in self._rules:
                match = pattern.fullmatch(name)
                if match is not None:
                    names = [match.expand(template) for template in rule.names]
                    yield from _apply(rule, name, names, value)
                    break
            else:
                yield name, value


def _apply(rule: Rule, name: str, names: list[str], value: Any) -> Iterator[tuple[str, Any]]:
    if not names:
        return
    if rule.transpose:
        value = _transposed(name, value)
    if len(names) == 1:
        yield names[0], value
        return
    if isinstance(value, Slice):
        raise ValueError(f"{name}: a slice cannot be split into {', '.join(names)}: slice the pieces instead")
    yield from _split(rule, name, names, value)


def _transposed(name: str, value: Any) -> Any:
    data = value.data if isinstance(value, Slice) else value
    if len(data.shape) != 2 or (isinstance(value, Slice) and value.offset is None):
        raise ValueError(f"{name}: only matrices and boxes of them can be transposed")
    if not isinstance(value, Slice):
        return data.T
    assert value.offset is not None
    return Slice(data.T, value.shape[::-1], offset=value.offset[::-1])


def _split(rule: Rule, name: str, names: list[str], value: Any) -> Iterator[tuple[str, Any]]:
    shape = tuple(int(n) for n in value.shape)
    length = shape[rule.axis] if rule.axis < len(shape) else 0
    sizes = rule.sizes or (length // len(names),) * len(names)
    if sum(sizes) != length or any(size % rule.groups for size in sizes):
        message = f"axis {rule.axis} of {shape} does not split into {sizes} in {rule.groups} groups"
        raise ValueError(f"{name}: {message}")
    before = (slice(None),) * rule.axis
    start = 0
    for group in range(rule.groups):
        for piece, size in zip(names, sizes, strict=True):
            count = size // rule.groups
            data = value[(*before, slice(start, start + count))]
            start += count
            if rule.groups == 1:
                yield piece, data
                continue
            whole = (*shape[: rule.axis], size, *shape[rule.axis + 1 :])
            offset = [0] * len(shape)
            offset[rule.axis] = group * count
            yield piece, Slice(data, whole, offset=tuple(offset))
