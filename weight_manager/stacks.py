"""Names under which trainers hold several served tensors as one: qkv_proj, gate_up_proj, a layer's experts.

Served are the single ones, of every family. Torch modules of some have them stacked: Phi-3, GLM; in transformers 5 the
experts of all. What is served next to each other to be read by one product is stacked in the same order: these are the
fused groups of the manifest. Names of families that have no such module are not taken: others stack in other orders
(by KV head, in Paddle and Megatron), and shapes would not tell.
"""

from dataclasses import dataclass
from itertools import groupby

from rollout_client.boxes import Box, Shape
from weight_manager.layout import Manifest, Parameter

_EXPERTS = ".experts."


@dataclass(frozen=True)
class Member:
    """One served tensor in a stack. corner: where it begins in the stack, which may have axes before its own."""

    parameter: Parameter
    corner: Shape

    def own(self, box: Box) -> Box | None:
        """The part of a box of the stack that lies in this tensor, as a box of it; None = no part does."""
        before = len(self.corner) - len(self.parameter.shape)
        extent = (1,) * before + self.parameter.shape
        low, high = (
            tuple(min(max(at - start, 0), size) for at, start, size in zip(side, self.corner, extent, strict=True))
            for side in box
        )
        return None if any(a >= b for a, b in zip(low, high, strict=True)) else (low[before:], high[before:])


@dataclass(frozen=True)
class Stack:
    """A tensor that is served as its members, which fill it."""

    name: str
    shape: Shape
    members: tuple[Member, ...]


def stacks(manifest: Manifest) -> dict[str, Stack]:
    """Every stack by its name. That of a layer's experts is transformers 5's, without ``.weight``: [experts, n, k]."""
    groups: dict[str, list[Parameter]] = {}
    for p in manifest.parameters:
        if p.fused is not None:
            groups.setdefault(p.fused, []).append(p)
    experts = [_experts(name, own) for name, own in groups.items() if _EXPERTS in name]
    held = [_rows(name, own, ()) for name, own in groups.items() if _module(name) in manifest.stacked]
    return {stack.name: stack for stack in (*experts, *held)}


def _module(name: str) -> str:
    """The last part of the module's path: qkv_proj of model.layers.0.self_attn.qkv_proj.weight; "" without one."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _rows(name: str, parameters: list[Parameter], before: Shape) -> Stack:
    """One after the other along axis 0, behind the axes `before` (a corner in them)."""
    members, rows = [], 0
    for p in parameters:
        members.append(Member(p, (*before, rows, *(0 for _ in p.shape[1:]))))
        rows += p.shape[0]
    return Stack(name, (*(1 for _ in before), rows, *parameters[0].shape[1:]), tuple(members))


def _experts(group: str, parameters: list[Parameter]) -> Stack:
    """Expert by expert, each with its rows one after the other."""
    by_expert = groupby(parameters, key=lambda p: p.name.partition(_EXPERTS)[2].partition(".")[0])
    each = [_rows(group, list(own), (index,)) for index, (_, own) in enumerate(by_expert)]
    members = tuple(member for stack in each for member in stack.members)
    return Stack(group.removesuffix(".weight"), (len(each), *each[0].shape[1:]), members)
