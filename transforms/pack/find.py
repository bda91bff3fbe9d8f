"""Where layers are that gain from being computed on packed weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from ...layers.packed import Packed
from ...passes.kinds import LEAST_GAIN, Judgement
from ...passes.rewriting import readers_in
from ...passes.sites import Cause, Refusal, Site
from ...passes.timing import last_level_bytes
from ...runtime.graphs import Region
from ...runtime.values import qualified
from ...tracing.program import Program
from .checking import Check
from .decompositions import spelled_at
from .epilogue import Epilogue, find_epilogue
from .layers import Packable, graphs_in, packable_at
from .timing import PACKED, TRANSPOSED, Calls, Lowerings, compared, fastest, figures_interleaved, largest_error
from .write import ACTIVATION

__all__ = ["IN_TRAINING", "found_in"]

_LEAST_TOGETHER = 0.5
"""What a convolution must gain by itself where those of a model gain together."""

_COLOURS = 4
"""Images have so many channels at most."""

_FEW_ROWS = 16
"""With so many rows at most, a linear layer waits for its weight."""

_BYTES = 4
"""Of a number in a weight."""

IN_TRAINING = "the model is in training, where weights change at every step; call model.eval() first"
"""Why nothing is packed then."""


Nodes = dict[str, str]
"""Label in a site -> name of a node."""

_Gains = dict[Hashable, Judgement]
"""What is known of each kind of layer."""


@dataclass(frozen=True)
class _FoundLayer:
    """A layer of a graph that can be computed on a packed weight, with what is computed together, in a dtype."""

    number: int
    layer: Packable
    epilogue: Epilogue
    dtype: torch.dtype

    @property
    def place(self) -> tuple[str, int]:
        return self.layer.call.owner, self.number

    @property
    def name(self) -> str:
        return self.layer.call.qualified_name

    @property
    def kind(self) -> Hashable:
        return self.layer.kind, self.epilogue.activation, self.epilogue.other is None, self.epilogue.joins

    @property
    def may_be_transposed(self) -> bool:
        return self.dtype is torch.float32 and self.layer.rows_given == 1 and not self.layer.call.inputs_first

    @property
    def has_rows(self) -> bool:
        """Return whether a linear layer, in float32, is given several rows."""
        return self.dtype is torch.float32 and self.layer.rows_given > 1

    def packed(self, *, transposed: bool = False) -> Packed:
        return self.layer.packed(self.epilogue.activation, self.dtype, self.epilogue.joins, transposed=transposed)


def found_in(program: Program, dtype: torch.dtype, budget: float) -> Iterator[Site | Refusal]:
    """Yield the layers of each graph that runs in evaluation as a site, and those that stay as they are."""
    if program.training:
        yield from (
            Refusal(IN_TRAINING, "(root)", Cause.IN_TRAINING) for _ in itertools.islice(_candidates(program, dtype), 1)
        )
        return
    layers: list[_FoundLayer] = []
    for item in _candidates(program, dtype):
        if isinstance(item, Refusal):
            yield item
        else:
            layers.append(item)
    gains = _gains(program, layers, budget)
    together = _gain_together(layers, gains)
    graphs: dict[tuple[str, int], list[_FoundLayer]] = {}
    for found in layers:
        least = _LEAST_TOGETHER if together and found.layer.geometry is not None else LEAST_GAIN
        if refusal := gains[found.kind].refusal(found.name, least):
            yield refusal
        else:
            graphs.setdefault(found.place, []).append(found)
    packed = {  # convolutions, and what is computed with them, whose results will lie channels last
        place: {node for found in group if found.layer.geometry for node in found.epilogue.inside}
        for place, group in graphs.items()
    }
    views = readers_in(program, packed) if any(packed.values()) else {}
    spelled = _spelled(program, graphs) if dtype is torch.float32 else {}
    for place in {**graphs, **views, **spelled}:
        other = {**views.get(place, {}), **spelled.get(place, {})}
        yield _site(program, place, graphs.get(place, []), other, gains)


def _spelled(program: Program, graphs: Mapping[tuple[str, int], Sequence[_FoundLayer]]) -> dict[tuple[str, int], Nodes]:
    """Return the activations of each graph that are written out, and not computed with a layer that is packed."""
    found: dict[tuple[str, int], list[fx.Node]] = {}
    taken: set[str] = set()
    for owner, number, graph in graphs_in(program):
        if not isinstance(program.module(owner), Region):
            within = {node for each in graphs.get((owner, number), ()) for node in each.epilogue.inside}
            nodes = [
                node for node in graph.nodes if node not in within and spelled_at(program, owner, node) is not None
            ]
            found[owner, number] = nodes
            taken |= {qualified(owner, str(node.target)) for node in (*within, *nodes) if node.op == "call_module"}
    return {
        (owner, number): {f"{ACTIVATION}{count}": node.name for count, node in enumerate(nodes)}
        for (owner, number), nodes in found.items()
        if nodes and owner not in taken
    }


def _gain_together(layers: Sequence[_FoundLayer], gains: _Gains) -> bool:
    """Say whether the convolutions of a model gain, all of them packed: in between, images would be laid out anew."""
    timed = [figures for found in layers if found.layer.geometry is not None and (figures := gains[found.kind].figures)]
    own, packed = (sum(figures[name] for figures in timed) for name in ("before_us", "after_us"))
    return own > LEAST_GAIN * packed


def _site(program: Program, place: tuple[str, int], group: Sequence[_FoundLayer], other: Nodes, gains: _Gains) -> Site:
    nodes = {f"layer.{count}": found.layer.call.node.name for count, found in enumerate(group)}
    kind = (*(found.kind for found in group), *(label for label in other if label.startswith(ACTIVATION)))
    known = [gains[found.kind] for found in group]
    speeds = [round(each.figures["speedup"], 3) for each in known if each.figures]
    transposed = [f"layer.{count}" for count, each in enumerate(known) if each.lowering == TRANSPOSED]
    # With data the plan says where the site is: which layers gain is not measured anew.
    return Site(
        program, place[0], {**nodes, **other}, place[1], detail=_detail(nodes, other, speeds), kind=kind,
        data={"speeds": speeds, **({"transposed": transposed} if transposed else {})},
        found=largest_error(known),
    )  # fmt: skip


def _detail(layers: Collection[str], other: Collection[str], speeds: Sequence[float]) -> str:
    if not layers and any(label.startswith(ACTIVATION) for label in other):
        return "activations in one operation"
    if not layers:
        return "results as they were in memory"
    what = "1 layer" if len(layers) == 1 else f"{len(layers)} layers"
    if not speeds:
        return what
    low, high = min(speeds), max(speeds)
    return f"{what}, {low:.3g}x{f' to {high:.3g}x' if high > low else ''} by themselves"


def _candidates(program: Program, dtype: torch.dtype) -> Iterator[_FoundLayer | Refusal]:
    for owner, number, graph in graphs_in(program):
        in_region = isinstance(program.module(owner), Region)
        for node in graph.nodes:
            layer = packable_at(program, owner, node)
            if layer is None:
                continue
            reason = "it is called in a region that does not own it" if in_region else layer.reason
            if reason:
                yield Refusal(reason, layer.call.qualified_name)
            else:
                yield _FoundLayer(number, layer, find_epilogue(layer.call), dtype)


def _gains(program: Program, layers: Sequence[_FoundLayer], budget: float) -> _Gains:
    """Return what each kind of layer of a known shape gains, where that is to be measured, and which are wrong."""
    kinds: dict[Hashable, list[_FoundLayer]] = {}
    for found in layers:
        if math.prod(found.layer.given or (0,)):
            kinds.setdefault(found.kind, []).append(found)
    gains: _Gains = {found.kind: Judgement() for found in layers}
    waiting, waits = dict[Hashable, Lowerings](), _waits_for_memory(layers)
    for kind, alike in kinds.items():
        first = alike[0]
        if first.layer.call.tensors()[0].is_meta:
            continue
        lowerings = {PACKED: _calls(alike)}
        if first.may_be_transposed and program.measuring:
            lowerings[TRANSPOSED] = _calls(alike, transposed=True)
        allowed = None if first.dtype is torch.float32 else budget
        gains[kind], right = compared(lowerings, allowed=allowed)
        if not right or not program.measuring:
            continue
        if waits and not program.measuring.is_cold and 0 < first.layer.rows_given <= _FEW_ROWS:
            waiting[kind] = right
        else:
            cold = program.measuring.is_cold
            gains[kind] = fastest(gains[kind], {name: calls.figures(cold=cold) for name, calls in right.items()})
    for kind, figures in figures_interleaved(waiting).items() if waiting else ():
        gains[kind] = fastest(gains[kind], figures)
    if any(found.layer.rows_given == 1 for found in layers):
        _take_single_rows(kinds, gains)
    return gains


def _take_single_rows(kinds: Mapping[Hashable, Sequence[_FoundLayer]], gains: _Gains) -> None:
    """Choose how layers of several rows compute one row, where the model is called with one, too, in the same graph."""
    single: dict[Hashable, Lowerings] = {}
    for kind, alike in kinds.items():
        if gains[kind].figures and alike[0].has_rows and gains[kind].reason_against() is None:
            ways = {PACKED: False, TRANSPOSED: True}
            calls = {name: _calls(alike, transposed=way, rows=1) for name, way in ways.items()}
            known, right = compared(calls, allowed=None)
            gains[kind] = replace(gains[kind], reason=known.reason)
            single |= {kind: right} if TRANSPOSED in right else {}
    for kind, figures in figures_interleaved(single).items() if single else ():
        gains[kind] = replace(gains[kind], lowering=fastest(gains[kind], figures).lowering)


def _waits_for_memory(layers: Sequence[_FoundLayer]) -> bool:
    """Say whether the weights of all linear layers are more than caches hold: between two calls each has left them."""
    sizes = {found.name: math.prod(found.layer.call.shape) for found in layers if found.layer.geometry is None}
    return _BYTES * sum(sizes.values()) > last_level_bytes()


def _calls(alike: Sequence[_FoundLayer], *, transposed: bool = False, rows: int = 0) -> Calls:
    """Return the calls of layers of a kind on what they are given, or on so many rows."""
    first, packed = alike[0], alike[0].packed(transposed=transposed)
    tensors = [found.layer.call.tensors() for found in alike]
    geometry = first.layer.geometry
    # What feeds a convolution is mostly another one; images are not.
    shape, channels = first.layer.given or (), 0 if geometry is None else tensors[0][0].shape[1] * geometry.groups
    shape = (rows, *shape[-1:]) if rows else shape
    lies_last = len(shape) in (4, 5) and channels > _COLOURS
    layer, adds = first.layer, first.epilogue.other is not None
    check = Check(packed, *tensors[0], adds, layer.outputs, layer.rows, layer.terms)
    return Calls(shape, packed.plainly, packed, tensors, check, lies_last, geometry is not None)
