"""What a trainer holds -> where its bytes go: pure functions of (parts, layout).

`place` turns the parts of one trainer rank into copies. `prove` shows that the parts of all ranks cover
every served element exactly once, or refuses with everything that is wrong. A part is a whole tensor, a
box of it, or a range of the flattened tensor, under any of the tensor's names: tied names are one tensor,
sent once. It may also be of several tensors that its trainer holds as one (stacks.py).

Served dtype and sent dtype may differ among float32, bfloat16 and float16; the trainer casts while it
copies. Widening is exact; narrowing (fp32 masters to bf16 serving is the usual case) rounds to nearest,
ties to even, as the trainer's own cast would. Anything else is refused.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from rollout_client.boxes import Box, Shape, flat_boxes, strides_of
from rollout_client.protocol import Copy, ErrorCode, Part
from weight_manager.coverage import tile
from weight_manager.errors import PushRefused
from weight_manager.layout import ITEMSIZE, Layout, Parameter, Region
from weight_manager.stacks import Stack, stacks
from weight_manager.together import Laid

_SHOWN = 20


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. tensor: the name it was sent under (served name when it was not sent)."""

    code: ErrorCode
    tensor: str
    detail: str


class PlanError(PushRefused):
    """The parts do not fit the layout. problems: all of them; code is the first one's."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        shown = "; ".join(f"{p.tensor}: {p.detail}" for p in problems[:_SHOWN])
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        super().__init__(problems[0].code, shown + more, list(dict.fromkeys(p.tensor for p in problems)))
        self.problems = tuple(problems)


def place(parts: Sequence[Part], layout: Layout) -> list[Copy]:
    """The copies of one trainer rank, `Copy.part` indexing `parts`; every element of every part is used.

    Raises PlanError for parts that are wrong in themselves or overlap each other; what other ranks must
    still bring is for `prove` to say.
    """
    return _Planner(layout).place(parts)


def prove(ranks: Sequence[Sequence[Part]], layout: Layout, *, partial: bool = False) -> tuple[str, ...]:
    """Every served element is sent exactly once by the parts of all trainer ranks together.

    partial: tensors of which nothing is sent are allowed; their canonical names are returned.
    Raises PlanError with every unknown, missing, duplicate, overlapping or misshapen tensor.
    """
    return _Planner(layout).prove(ranks, partial=partial)


class Planned:
    """The last plan: a trainer pushes the same tensors again and again, and planning hundreds takes a millisecond."""

    def __init__(self) -> None:
        self._of: object = None
        self._copies: list[Copy] = []
        self._kept: tuple[str, ...] = ()
        self._laid: tuple[list[Copy], Laid | None] | None = None

    def laid(self, copies: list[Copy], names: Callable[[], list[str]], layout: Layout) -> Laid | None:
        """How copies that `plan` has returned lie, if each lies in one piece. names: makes the tensor of each."""
        if self._laid is None or self._laid[0] is not copies:
            self._laid = copies, Laid.of(copies, names(), layout)
        return self._laid[1]

    def plan(
        self, of: object, make: Callable[[], tuple[list[Copy], tuple[str, ...]]]
    ) -> tuple[list[Copy], tuple[str, ...]]:
        """The last trainer rank's copies, and the tensors that are kept. of: all that they depend on. Raises what
        `make` raises; nothing is remembered of that.
        """
        if self._of != of:
            self._copies, self._kept = make()
            self._of = of
        return self._copies, self._kept


class _Planner:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.itemsize = ITEMSIZE[layout.manifest.dtype]
        self.parameters = {name: p for p in layout.manifest.parameters for name in (p.name, *p.aliases)}
        self.stacks = stacks(layout.manifest)
        self.regions: dict[str, list[Region]] = {}
        for region in layout.regions:
            self.regions.setdefault(region.name, []).append(region)

    def place(self, parts: Sequence[Part]) -> list[Copy]:
        problems, held = self._sort(parts)
        for p, mine in held.values():
            problems += _tiling_problems(p, mine, complete=False)
        if problems:
            raise PlanError(problems)
        return [copy for index, part in enumerate(parts) for copy in self._copies(index, part)]

    def prove(self, ranks: Sequence[Sequence[Part]], *, partial: bool) -> tuple[str, ...]:
        problems, held = self._sort([part for parts in ranks for part in parts])
        wrong = {name for q in problems for name in self._served_by(q.tensor)}
        kept = []
        for p in self.layout.manifest.parameters:
            if p.name in held:
                problems += _tiling_problems(p, held[p.name][1], complete=p.name not in wrong)
            elif p.name not in wrong and not partial:
                problems.append(Problem("missing_tensor", p.name, f"was not sent, shape {p.shape}"))
            elif p.name not in wrong:
                kept.append(p.name)
        if problems:
            raise PlanError(problems)
        return tuple(kept)

    def _sort(self, parts: Sequence[Part]) -> tuple[list[Problem], dict[str, tuple[Parameter, list[Part]]]]:
        """What is wrong with single parts, and the good ones by canonical name."""
        problems: list[Problem] = []
        held: dict[str, tuple[Parameter, list[Part]]] = {}
        for part in parts:
            p, stack = self.parameters.get(part.name), self.stacks.get(part.name)
            served = p or stack
            problem = _part_problem(part, None if served is None else served.shape)
            if problem is not None:
                problems.append(problem)
            elif p is not None:
                held.setdefault(p.name, (p, []))[1].append(part)
            elif stack is not None:
                for member, piece in _through(part, stack):
                    low, high = piece.box
                    extent = tuple(b - a for a, b in zip(low, high, strict=True))
                    own = Part(part.name, part.dtype, member.shape, low, extent)
                    held.setdefault(member.name, (member, []))[1].append(own)
        return problems, held

    def _served_by(self, name: str) -> list[str]:
        """The tensors that are sent under a name."""
        if name in self.parameters:
            return [self.parameters[name].name]
        return [member.parameter.name for member in self.stacks[name].members] if name in self.stacks else []

    def _copies(self, index: int, part: Part) -> Iterator[Copy]:
        if part.name in self.stacks:
            for member, piece in _through(part, self.stacks[part.name]):
                yield from self._cut(index, piece, member)
            return
        p = self.parameters[part.name]
        if part.flat is None and not part.local_shape and len(self.regions[p.name]) == 1:
            (region,) = self.regions[p.name]
            if region.shape == p.shape:  # nearly all there is: one run of bytes to another
                yield Copy(
                    index, (prod(p.shape),), 0, (1,), region.offset // self.itemsize, (1,), self.layout.manifest.dtype
                )
                return
        for piece in _pieces(part):
            yield from self._cut(index, piece, p)

    def _cut(self, index: int, piece: "_Piece", p: Parameter) -> Iterator[Copy]:
        """The copies that bring a piece of one tensor to all regions that it overlaps."""
        for region in self.regions[p.name]:
            copy = self._copy(index, piece, region)
            if copy is not None:
                yield copy

    def _copy(self, index: int, piece: "_Piece", region: Region) -> Copy | None:
        """Intersection of a source box with a region, as few axes as say it."""
        dst_offset = region.offset // self.itemsize
        (low, high), src_offset, src_strides = piece
        shape: list[int] = []
        src: list[int] = []
        dst: list[int] = []
        dst_strides = strides_of(region.shape)
        for axis, start in enumerate(region.start):
            first = max(low[axis], start)
            count = min(high[axis], start + region.shape[axis]) - first
            if count <= 0:
                return None
            src_offset += (first - low[axis]) * src_strides[axis]
            dst_offset += (first - start) * dst_strides[axis]
            if shape and src[-1] == count * src_strides[axis] and dst[-1] == count * dst_strides[axis]:
                shape[-1] *= count
                src[-1], dst[-1] = src_strides[axis], dst_strides[axis]
            elif count > 1:
                shape.append(count)
                src.append(src_strides[axis])
                dst.append(dst_strides[axis])
        if not shape:
            shape, src, dst = [1], [1], [1]
        return Copy(index, tuple(shape), src_offset, tuple(src), dst_offset, tuple(dst), self.layout.manifest.dtype)


class _Piece(NamedTuple):
    """A box of the tensor and how it lies in the trainer's buffer, in elements."""

    box: Box
    src_offset: int
    src_strides: Shape


def _pieces(part: Part) -> Iterator[_Piece]:
    if part.flat is not None:
        start, stop = part.flat
        strides = strides_of(part.shape)
        for low, high in flat_boxes(start, stop, part.shape):
            offset = sum(i * s for i, s in zip(low, strides, strict=True)) - start
            yield _Piece((low, high), offset, strides)
    elif part.local_shape:
        stop_at = tuple(a + n for a, n in zip(part.offset, part.local_shape, strict=True))
        yield _Piece((part.offset, stop_at), 0, strides_of(part.local_shape))
    else:
        yield _Piece(((0,) * len(part.shape), part.shape), 0, strides_of(part.shape))


def _through(part: Part, stack: Stack) -> Iterator[tuple[Parameter, _Piece]]:
    """The members of a stack that a part of it holds something of, and that as pieces of theirs."""
    for piece in _pieces(part):
        for member in stack.members:
            box = member.own(piece.box)
            if box is None:
                continue
            before = len(stack.shape) - len(member.parameter.shape)
            start = (*member.corner[:before], *(a + b for a, b in zip(member.corner[before:], box[0], strict=True)))
            steps = zip(start, piece.box[0], piece.src_strides, strict=True)
            offset = piece.src_offset + sum((at - low) * stride for at, low, stride in steps)
            yield member.parameter, _Piece(box, offset, piece.src_strides[before:])


def _part_problem(part: Part, shape: Shape | None) -> Problem | None:
    if shape is None:
        return Problem("unknown_tensor", part.name, "is not served by this model")
    if part.dtype not in ITEMSIZE:
        return Problem(
            "dtype_mismatch", part.name, f"dtype {part.dtype} cannot be sent, use one of {', '.join(ITEMSIZE)}"
        )
    if part.shape != shape:
        hint = ", which is its transpose (Linear weights are [out, in] here)" if part.shape == shape[::-1] else ""
        return Problem("shape_mismatch", part.name, f"shape {part.shape} was sent, {shape} is served{hint}")
    if part.flat is not None:
        start, stop = part.flat
        if part.offset or part.local_shape or not 0 <= start <= stop <= prod(shape):
            return Problem("shape_mismatch", part.name, f"flat range {part.flat} does not fit {prod(shape)} elements")
    elif part.offset or part.local_shape:
        fits = len(part.offset) == len(part.local_shape) == len(shape) and all(
            a >= 0 and n >= 0 and a + n <= size for a, n, size in zip(part.offset, part.local_shape, shape, strict=True)
        )
        if not fits:
            box = f"box at {part.offset} of shape {part.local_shape}"
            return Problem("shape_mismatch", part.name, f"{box} does not fit {shape}")
    return None


def _tiling_problems(p: Parameter, parts: Sequence[Part], *, complete: bool) -> list[Problem]:
    """Overlaps, and with `complete` gaps, among the parts of one tensor."""
    if len(parts) == 1 and parts[0].flat is None and not parts[0].local_shape:
        return []
    boxes = [box for part in parts for box, *_ in _pieces(part) if all(a < b for a, b in zip(*box, strict=True))]
    found = tile(boxes, p.shape)
    problems = []
    if found.overlap is not None:
        names = list(dict.fromkeys(part.name for part in parts))
        if len(names) > 1:
            why = "they are tied" if {*names} <= {p.name, *p.aliases} else f"both hold {p.name}"
            problems.append(Problem("duplicate_tensor", names[1], f"was also sent as {names[0]}, {why}: send one"))
        elif len(set(parts)) < len(parts) or all(not part.local_shape and part.flat is None for part in parts):
            problems.append(Problem("duplicate_tensor", names[0], f"was sent {len(parts)} times"))
        else:
            problems.append(
                Problem("overlapping_tensor", names[0], f"was sent more than once at {_show(found.overlap)}")
            )
    if complete and found.gap is not None:
        name = parts[0].name if parts[0].name in {p.name, *p.aliases} else p.name  # not a stack's
        problems.append(Problem("missing_tensor", name, f"of {p.shape} nothing was sent at {_show(found.gap)}"))
    return problems


def _show(box: Box) -> str:
    return "[" + ", ".join(f"{low}:{high}" for low, high in zip(*box, strict=True)) + "]"
