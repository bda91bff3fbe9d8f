"""Where layers are that gain from being computed on packed weights."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, fx

from ...layers.packed import NO_ACTIVATION, Activation, PackedLinear
from ...passes.rewriting import Place
from ...passes.sites import Refusal, Site
from ...passes.timing import Interval
from ...tracing.graphs import Region
from ...tracing.program import Program
from ...tracing.values import TensorMeta, qualified
from .behind import activation_behind
from .layers import Layer, layer_at
from .timing import Calls, Gains

__all__ = ["found_in"]

_IN_TRAINING = "the model is in training, where weights change at every step; call model.eval() first"


@dataclass(frozen=True)
class _Found:
    """A layer that can be computed on a packed weight.

    Attributes:
        owner, number: the graph.
        layer: the call.
        activation: behind it.
        dtype: that it would be computed in.
    """

    owner: str
    number: int
    layer: Layer
    activation: Activation
    dtype: torch.dtype

    @property
    def name(self) -> str:
        layer = self.layer
        return qualified(self.owner, layer.modules[0] if layer.modules else layer.node.name)

    @cached_property
    def shape(self) -> tuple[int, ...] | None:
        """Return the shape of what it is given, where that is known."""
        meta = self.layer.x.meta.get("val")
        return tuple(map(int, meta.shape)) if isinstance(meta, TensorMeta) else None

    @property
    def kind(self) -> Hashable:
        layer = self.layer
        return self.shape, layer.shape, layer.transposed, layer.bias is None, self.activation

    @property
    def packed(self) -> PackedLinear:
        return PackedLinear(self.activation, self.dtype, self.layer.transposed)

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute it as it is."""
        return self.packed.plainly(x, weight, bias)


def found_in(program: Program, dtype: torch.dtype) -> Iterator[Site | Refusal]:
    """Yield the layers of each graph that runs in evaluation as a site, and those that stay as they are."""
    layers: list[_Found] = []
    for item in _candidates(program, dtype):
        if isinstance(item, Refusal):
            yield item
        else:
            layers.append(item)
    gains = _gains(program, layers)
    graphs: dict[tuple[str, int], list[_Found]] = {}
    for found in layers:
        gain = gains.get(found.kind)
        if gain is not None and gain.low <= 1:
            yield Refusal(f"it would be no faster: {gain.mid:.3g}x ({gain.low:.3g} to {gain.high:.3g})", found.name)
        else:
            graphs.setdefault((found.owner, found.number), []).append(found)
    for (owner, number), group in graphs.items():
        nodes = {f"layer.{place}": found.layer.node.name for place, found in enumerate(group)}
        kind = tuple(found.kind for found in group)
        speeds = [round(gains[found.kind].mid, 3) for found in group if found.kind in gains]
        # With data the plan says where the site is: which layers gain is not measured anew.
        yield Site(program, owner, nodes, number, detail=_detail(nodes, speeds), kind=kind, data={"speeds": speeds})


def _detail(layers: Collection[str], speeds: Sequence[float]) -> str:
    what = "1 layer" if len(layers) == 1 else f"{len(layers)} layers"
    if not speeds:
        return what
    low, high = min(speeds), max(speeds)
    return f"{what}, {low:.3g}x{f' to {high:.3g}x' if high > low else ''} by themselves"


def _candidates(program: Program, dtype: torch.dtype) -> Iterator[_Found | Refusal]:
    for owner, capture in program.captures.items():
        module = program.module(owner)
        for number, specialization in enumerate(capture.specializations):
            if not (specialization.runs_in_mode(module) or program.training):
                continue
            for node in specialization.graph.nodes:
                layer = layer_at(program, owner, node)
                if layer is not None:
                    in_region = isinstance(module, Region)
                    yield _candidate(program, owner, number, layer, dtype, in_region=in_region)


def _candidate(
    program: Program, owner: str, number: int, layer: Layer, dtype: torch.dtype, *, in_region: bool
) -> _Found | Refusal:
    found = _Found(owner, number, layer, _activation(program, owner, layer.node), dtype)
    reason = layer.objection
    if in_region:
        reason = "it is called in a region that does not own it"
    if program.training:
        reason = _IN_TRAINING
    return Refusal(reason, found.name) if reason else found


def _activation(program: Program, owner: str, node: fx.Node) -> Activation:
    behind = activation_behind(Place(program, owner), node)
    return NO_ACTIVATION if behind is None else behind[1]


def _gains(program: Program, layers: Sequence[_Found]) -> dict[Hashable, Interval]:
    """Return what each kind of layer gains, where it is to be measured and its shape is known."""
    if not program.measuring:
        return {}
    kinds: dict[Hashable, list[_Found]] = {}
    for found in layers:
        if found.shape is not None:
            kinds.setdefault(found.kind, []).append(found)
    gains = Gains()
    for kind, alike in kinds.items():
        gains.of(kind, lambda alike=alike: _calls(program, alike))
    return gains.known


def _calls(program: Program, alike: Sequence[_Found]) -> Calls:
    first = alike[0]
    packed, tensors = first.packed, [found.layer.tensors(program, found.owner) for found in alike]
    return Calls(first.shape or (), first.plain, packed, tensors)
