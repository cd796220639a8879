"""What an adapter's trainer holds -> which modules it has, and where each A and B lies: pure functions.

An adapter is laid out as a model's weights are: its A's and B's are the parameters of a manifest, split over ranks as
the module's weight is. Of a weight split by rows, ranks hold the whole A and their rows of B; of one split by columns,
their columns of A and the whole B, so that partial products add up in the sum that the ranks make anyway.
Members of a fused group (qkv, gate_up) that all have an adapter lie one after the other, A with A and B with B.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from rollout_client.peft import A, AdapterConfig, B
from rollout_client.protocol import Copy, Dtype, Part
from weight_manager.errors import PushRefused
from weight_manager.layout import Layout, Manifest, Parameter, make_layout
from weight_manager.plan import PlanError, Problem
from weight_manager.processor_limit import OverLimit, processor_limit

_WEIGHT = ".weight"
_MATCH_S = 1.0
"""Seconds of processor time that a push's patterns may take, in which the store does nothing else. A pattern for each
of 560 modules takes 0.1."""


class AdapterModule(msgspec.Struct, frozen=True, array_like=True):
    """One adapted matrix: scale B A x is added to its W x.

    name: of the served weight, without ``.weight``. rank: rows of A, columns of B. scale: PEFT's, of alpha and rank.
    """

    name: str
    rank: int
    scale: float


class AdapterShape(msgspec.Struct, frozen=True):
    """Everything about an adapter but its numbers; in the order of the model's manifest."""

    dtype: Dtype
    modules: tuple[AdapterModule, ...]

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(module.rank for module in self.modules)


@dataclass(frozen=True)
class Piece:
    """A served tensor, or a part of one, and where it lies: in part `index` of those sent, from element `offset`."""

    part: Part
    index: int
    offset: int = 0


class AdapterPlanner:
    """Knows the model's modules by the names that trainers use: with or without ``model.`` before them."""

    def __init__(self, base: Layout) -> None:
        self.base = base
        self._order: dict[str, int] = {}
        self._weights = {p.name.removesuffix(_WEIGHT): p for p in base.manifest.parameters if p.name.endswith(_WEIGHT)}
        self._members: dict[str, tuple[str, ...]] = {}
        for module, p in self._weights.items():
            if not module.endswith("_proj") or len(p.shape) != 2 or ".mtp_" in module:
                continue
            self._order[module] = len(self._order)
            self._members[_bare(module)] = (module,)
            if p.fused:
                group = _bare(p.fused.removesuffix(_WEIGHT))
                self._members[group] = (*self._members.get(group, ()), module)

    def shape(self, config: AdapterConfig, parts: Sequence[Part], max_rank: int) -> AdapterShape:
        """The modules that the config says are adapted, and those of which something is sent.

        Raises PlanError with every module that cannot be: unknown, over the largest rank. PushRefused for a config
        whose patterns are not matched with all modules in a bearable time.
        """
        try:
            with processor_limit(_MATCH_S):
                return self._shape(config, parts, max_rank)
        except OverLimit:
            message = (
                "the adapter's config: matching its patterns (target_modules, rank_pattern, alpha_pattern) with the "
                f"model's modules takes more than {_MATCH_S:g} s: write them without repetitions of repetitions"
            )
            raise PushRefused("bad_message", message) from None

    def _shape(self, config: AdapterConfig, parts: Sequence[Part], max_rank: int) -> AdapterShape:
        problems: list[Problem] = []
        origins: dict[str, str] = {}  # served module -> the trainer's
        for part in parts:
            module, which = _split(part.name)
            members = self._resolve(module) if which else ()
            if not which:
                problems.append(Problem("unknown_tensor", part.name, "is neither a lora_A nor a lora_B of a module"))
            elif not members:
                detail = f"no adapter can be served on {self._what(module)}"
                problems.append(Problem("unknown_tensor", part.name, detail))
            for member in members:
                if origins.setdefault(member, module) != module:
                    detail = f"{member} has one of {origins[member]}, too"
                    problems.append(Problem("duplicate_tensor", part.name, detail))
        for module in self._expected(config, experts=any(".experts." in module for module in origins)):
            origins.setdefault(module, module)
        modules = [
            AdapterModule(name, config.rank(origin), config.scale(origin))
            for name, origin in sorted(origins.items(), key=lambda item: self._order[item[0]])
        ]
        for adapted in modules:
            if adapted.rank > max_rank:
                detail = f"rank {adapted.rank} is over the largest that is served, {max_rank} (max_adapter_rank)"
                problems.append(Problem("too_large", f"{adapted.name}.{A}", detail))
        if problems:
            raise PlanError(problems)
        wide = any(part.dtype != "bfloat16" for part in parts)
        return AdapterShape("float32" if wide else "bfloat16", tuple(modules))

    def pieces(self, parts: Sequence[Part]) -> list[Piece]:
        """What was sent, by the names that are served. A module that is fused in the trainer is several here: they
        share its A, and each has its rows of B. What is not known keeps its name.

        Raises PlanError for a slice of a fused module.
        """
        return [piece for index, part in enumerate(parts) for piece in self._pieces(part, index)]

    def _pieces(self, part: Part, index: int) -> Iterator[Piece]:
        module, which = _split(part.name)
        members = self._resolve(module) if which else ()
        if len(members) < 2:
            name = f"{members[0]}.{which}" if members else part.name
            yield Piece(msgspec.structs.replace(part, name=name), index)
            return
        if part.flat is not None or part.local_shape:
            detail = f"a slice of it cannot be divided among {', '.join(members)}: send the whole, or slices of those"
            raise PlanError([Problem("shape_mismatch", part.name, detail)])
        rows = [self._weights[member].shape[0] for member in members]
        divides = which == B and len(part.shape) == 2 and part.shape[0] == sum(rows)
        start = 0
        for member, count in zip(members, rows, strict=True):
            shape = (count, part.shape[1]) if divides else part.shape
            piece = msgspec.structs.replace(part, name=f"{member}.{which}", shape=shape)
            yield Piece(piece, index, start * part.shape[1] if divides else 0)
            start += count

    def _expected(self, config: AdapterConfig, *, experts: bool) -> Iterator[str]:
        """Served modules that the config speaks of. experts: those of experts, too, which in some trainers are no
        modules of their own.
        """
        for name, members in self._members.items():
            if config.targets(f"model.{name}") and (experts or ".experts" not in name):
                yield from members

    def _resolve(self, module: str) -> tuple[str, ...]:
        """Served modules that it is; () = none."""
        return self._members.get(_bare(module), ())

    def _what(self, module: str) -> str:
        """Why a module can have no adapter, in words for a trainer."""
        if f"model.{_bare(module)}" in self._weights or module in self._weights:
            return f"{module}: only the projections of attention and MLP take one"
        return f"{module}, which this model does not have"


def adapter_layout(shape: AdapterShape, base: Layout) -> Layout:
    """Where everything of an adapter lies; its digest names the modules with their ranks and scales, too."""
    weights = {p.name: p for p in base.manifest.parameters}
    of = {module.name: module for module in shape.modules}
    groups: dict[str, list[str]] = {}
    for p in base.manifest.parameters:
        if p.fused and p.name.endswith(_WEIGHT):
            groups.setdefault(p.fused, []).append(p.name.removesuffix(_WEIGHT))
    whole = {
        member: group.removesuffix(_WEIGHT)
        for group, members in groups.items()
        if len(members) > 1 and all(m in of for m in members) and len({of[m].rank for m in members}) == 1
        for member in members
    }
    parameters = [
        p
        for which in (A, B)
        for module in shape.modules
        for p in [_parameter(module, which, weights[module.name + _WEIGHT], whole.get(module.name))]
    ]
    scales = xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(shape))
    manifest = Manifest(f"{base.manifest.model} adapter {scales}", shape.dtype, tuple(parameters))
    return make_layout(manifest, base.tp)


def in_trainers_terms(copies: Sequence[Copy], pieces: Sequence[Piece]) -> list[Copy]:
    """Copies of pieces -> copies of the parts that were sent."""
    return [
        Copy(
            *(pieces[c.part].index, c.shape, c.src_offset + pieces[c.part].offset, c.src_strides),
            *(c.dst_offset, c.dst_strides, c.dst_dtype),
        )
        for c in copies
    ]


def _parameter(module: AdapterModule, which: str, weight: Parameter, group: str | None) -> Parameter:
    """A or B of a module. group: all members of which have an adapter of this rank."""
    rows, columns = weight.shape
    fused = None if group is None else f"{group}.{which}"
    name = f"{module.name}.{which}"
    if which == A:
        split = {"split": 1, "heads": weight.heads, "group": weight.group} if weight.split == 1 else {}
        return Parameter(name, (module.rank, columns), fused=fused, **split)  # type: ignore[arg-type]
    split = {"split": 0, "heads": weight.heads, "group": weight.group} if weight.split == 0 else {}
    return Parameter(name, (rows, module.rank), fused=fused, **split)  # type: ignore[arg-type]


def _split(name: str) -> tuple[str, str]:
    """(module, lora_A or lora_B); "" for the latter when the name is neither's."""
    module, _, which = name.rpartition(".")
    return (module, which) if which in (A, B) and module else (name, "")


def _bare(module: str) -> str:
    """Without ``model.`` before it, however often it stands there."""
    while module.startswith("model."):
        module = module.removeprefix("model.")
    return module
