"""Where a batch norm follows a layer, or stands before one, that it can be folded into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.nn.functional as F
from torch import fx, nn

from ...passes.rewriting import LayerCall, only_user
from ...passes.sites import Refusal
from ...runtime.graphs import Specialization, required_capture
from ...runtime.values import qualified
from ...tracing.program import Program
from .parts import NORMS, Norm, layer_at, norm_at

__all__ = ["FoldedCall", "Pair", "evaluated", "pairs_in", "source_of", "unfolded"]

_REASON = "it is a call of F.batch_norm on tensors that are not the model's, or with a mode that is computed"


class FoldedCall(NamedTuple):
    """Where one graph calls a norm on a layer's output, or a layer on a norm's."""

    specialization: int
    layer: fx.Node
    norm: fx.Node


@dataclass(frozen=True, eq=False)
class Pair:
    """A norm and the layer behind it (`before`) or before it, with all calls of one on the other's output."""

    owner: str
    layer: LayerCall
    norm: Norm
    before: bool = False
    calls: list[FoldedCall] = field(default_factory=list["FoldedCall"])

    @property
    def modules(self) -> tuple[tuple[str, nn.Module], ...]:
        """Return what the report calls those of the two that are modules, and the modules."""
        both = (self.layer.kind, self.layer.module), ("batch norm", self.norm.module)
        return tuple((what, module) for what, module in both if module is not None)

    @property
    def tensors(self) -> dict[str, str]:
        """Return what goes into the fold: qualified name -> the name in the owner."""
        statistics = {name: path for name, path in self.norm.tensors.items() if name != "num_batches_tracked"}
        paths = (*self.layer.paths.values(), *statistics.values())
        return {qualified(self.owner, path): path for path in paths}

    @property
    def place(self) -> str:
        """Return the norm's qualified name."""
        return qualified(self.owner, self.norm.name)


def pairs_in(program: Program) -> list[Pair]:
    """Return every pair in a program; of a norm between two layers both pairs, first that with the layer before it."""
    modules = any(isinstance(module, tuple(NORMS)) for module in program.names.distinct)
    return [pair for owner in program.captures for pair in _pairs(program, owner, modules=modules)]


def evaluated(program: Program, owner: str) -> list[tuple[int, Specialization]]:
    """Return the graphs of a module that can run in evaluation mode, with their numbers."""
    module = program.module(owner)
    return [item for item in enumerate(required_capture(module).specializations) if item[1].runs_in_mode(module)]


def source_of(node: fx.Node) -> fx.Node | None:
    """Return what a layer or norm is computed of."""
    if node.op == "call_module":
        return node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else None
    source = node.args[0] if node.args else node.kwargs.get("input")
    return source if isinstance(source, fx.Node) else None


def _pairs(program: Program, owner: str, *, modules: bool) -> list[Pair]:
    found: dict[tuple[str, str, bool], Pair] = {}
    for number, specialization in evaluated(program, owner):
        graph = specialization.graph
        called = graph.find_nodes(op="call_module") if modules else ()  # of an ensemble without norms there are many
        for node in (*called, *graph.find_nodes(op="call_function", target=F.batch_norm)):
            for layer, norm, call, before in _around(program, owner, number, node):
                key = layer.paths.get("weight", layer.name), norm.tensors.get("running_mean", norm.name), before
                found.setdefault(key, Pair(owner, layer, norm, before)).calls.append(call)
    return list(found.values())


def _around(
    program: Program, owner: str, specialization: int, node: fx.Node
) -> Iterator[tuple[LayerCall, Norm, FoldedCall, bool]]:
    """Yield the layer before a norm and the one behind it."""
    norm, source = norm_at(program, owner, node), source_of(node)
    if norm is None or source is None:
        return
    layer = layer_at(program, owner, source)
    if layer is not None and layer.rank in norm.ranks:
        yield layer, norm, FoldedCall(specialization, source, node), False
    user = only_user(node)
    layer = layer_at(program, owner, user)
    if layer is not None and user is not None and layer.rank in norm.ranks and source_of(user) is node:
        yield layer, norm, FoldedCall(specialization, user, node), True


def unfolded(program: Program) -> Iterator[Refusal]:
    """Yield calls of `F.batch_norm` behind a layer that compute with something that is not known."""
    found: dict[str, None] = {}
    for owner in program.captures if not program.training else ():
        for _, specialization in evaluated(program, owner):
            for node in specialization.graph.find_nodes(op="call_function", target=F.batch_norm):
                if norm_at(program, owner, node) is None and layer_at(program, owner, source_of(node)) is not None:
                    found.setdefault(qualified(owner, node.name))
    return (Refusal(_REASON, place) for place in found)
