"""Where regions are that an engine may compute: in modules of which the graph, with all that it calls, is known."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ...errors import MatchFailure
from ...layers.delegated import DelegatedRegion, engine_named, judged_outside
from ...passes.rewriting import bound
from ...passes.sites import Cause, Phase, Refusal, Site
from ...runtime.graphs import required_capture
from ...runtime.guards import reader
from ...runtime.values import Meta, TensorMeta, copied, map_tensors, meta_of, qualified
from ...tracing.isolation import preserved
from ...tracing.program import GraphRunner, Program, is_called, outermost
from ..flatten_calls import Flat, flattened
from .kinds import heavy_count, is_in_8_bits, name_of
from .regions import Cut, Region
from .rounding import share_rounding

__all__ = ["Found", "found_in", "has_8_bits", "look", "seconds_to_take"]

_LEAST_SHARE = 0.8
"""Regions of less than this part of a model gain less together than the passes that would find their graphs taken."""
_MOST_NAMED = 3


@dataclass(frozen=True, eq=False)
class Found:
    """A graph of a module with what it calls written out, and cut into regions."""

    number: int
    flat: Flat
    cut: Cut
    runner: _Runner
    prepared: dict[Any, DelegatedRegion] = field(default_factory=dict[Any, "DelegatedRegion"])  # by engine and place

    def settle(self, way: object) -> None:
        """Let regions be as fast as they can in the way that was chosen, and let go of those in others."""
        for key in [key for key in self.prepared if key[0] != way]:
            del self.prepared[key]
        for region in self.prepared.values():
            region.settle()

    def given(self, region: Region) -> list[Tensor]:
        """Return what a region is given in the recorded call; raise MatchFailure where that is no tensor."""
        values = self.runner.values_of(region.inputs)
        if not all(isinstance(each, Tensor) for each in values):
            raise MatchFailure("a region is given what is no tensor")
        return values


def found_in(program: Program, engines: Sequence[str], *, required: bool, in_8_bits: bool) -> Iterator[Site | Refusal]:
    """Yield the outermost modules that have regions for an engine, and why others have none; layers of `quantize` are
    opened if `in_8_bits`.
    """
    if program.training:
        yield Refusal("the model is in training; call model.eval() first", "(root)", Cause.IN_TRAINING)
        return
    if not program.inputs:
        yield Refusal("no example_inputs, which an engine is prepared for and compared on", "(root)")
        return
    sites = list[Site]()
    for owner, found in _outermost(program, in_8_bits=in_8_bits):
        for each in found:
            closed = {path: why for path, why in each.flat.closed.items() if why}
            yield from (Refusal(why, qualified(owner, path)) for path, why in closed.items())
        regions = [region for each in found for region in each.cut.regions]
        if regions:
            sites.append(_site(program, owner, found, engines, required=required))
    taken = sum(max(sum(heavy_count(r.computed) for r in each.cut.regions) for each in site.found) for site in sites)
    heavy = sum(_heavy_in(program, owner) for owner in program.captures) if sites else 0
    is_chosen = required or program.replaying or not program.measuring
    if sites and not is_chosen and taken < _LEAST_SHARE * heavy:
        text = f"engines would compute {taken} of {heavy} products and convolutions, between calls that stay"
        yield Refusal(f"{text}; name an engine to have them all the same", "(root)")
        return
    yield from sites


def has_8_bits(found: Iterable[Found]) -> bool:
    """Say whether layers of `quantize{scheme=int8_static}` are in a region."""
    return any(is_in_8_bits(node) for each in found for region in each.cut.regions for node in region.computed)


def seconds_to_take(site: Site, engine: str) -> float:
    """Return about how much processor time an engine takes to make the regions of a site ready. How long a part of a
    model takes by itself is not known, and is left out.
    """
    regions = [region for each in site.found for region in each.cut.regions]
    forward = 0.0 if site.owner else site.program.forward_seconds / len(regions)
    nodes = (len(each.computed) + len(each.tensors) for each in regions)
    return sum(engine_named(engine).seconds_to_take(count, forward) for count in nodes)


def _outermost(program: Program, *, in_8_bits: bool) -> Iterator[tuple[str, list[Found]]]:
    """Yield the outermost modules with what is found in each; what has regions is not looked into again."""
    opened, together = set[str](), list[str]()
    for owner in outermost(program, opened):
        found = look(program, owner, together, in_8_bits=in_8_bits)
        together = list(program.captures)  # mostly the first one is enough
        if any(each.cut.regions for each in found):
            opened |= {qualified(owner, path) for each in found for path in each.flat.opened}
        yield owner, found


def _heavy_in(program: Program, owner: str) -> int:
    """Return how many products and convolutions a module computes itself in a call."""
    if not is_called(program, owner):
        return 0
    graphs = [each.graph for each in required_capture(program.module(owner)).specializations]
    return max(heavy_count(graph.nodes, lambda node: program.callee(owner, node)) for graph in graphs)


def _site(program: Program, owner: str, found: list[Found], engines: Sequence[str], *, required: bool) -> Site:
    regions = [region for each in found for region in each.cut.regions]
    operations = sum(len(region.computed) for region in regions)
    count = f"{len(regions)} region{'s' * (len(regions) != 1)}"
    between = dict.fromkeys(name_of(node) for each in found for node in each.cut.dividing)
    return Site(
        program, owner, {}, phase=Phase.EVAL, choices=tuple(engines), required=required, found=found,
        detail=f"{operations} operations in {count}{_between(list(between))}",
    )  # fmt: skip


def _between(calls: Sequence[str]) -> str:
    """Say which calls stay between regions."""
    more = f" and {len(calls) - _MOST_NAMED} others" if len(calls) > _MOST_NAMED else ""
    return f", between {', '.join(calls[:_MOST_NAMED])}{more}" if calls else ""


def look(program: Program, owner: str, together: Sequence[str] = (), *, in_8_bits: bool) -> list[Found]:
    """Return those graphs of a module that its recorded calls in evaluation run, cut into regions; the calls of some
    are recorded `together`.
    """
    module = program.module(owner)
    capture = required_capture(module)
    made = program.whole_calls
    if owner:
        made = program.recording([program.module(name) for name in together or [owner]]).calls.get(module, [])
    calls = (bound(capture, call.args, call.kwargs) for call in made)
    named = [{"self": module, **given} for given in calls if given is not None]
    result: list[Found] = []
    for number, specialization in enumerate(capture.specializations):
        if not specialization.runs_in_mode(module):
            continue
        fitting = next((names for names in named if specialization.fits(names)), None)
        if fitting is None:
            continue
        if any(earlier.flat.specialization.fits(fitting) for earlier in result):
            continue  # that one runs
        flat = flattened(program, owner, specialization, quantized=in_8_bits)
        if in_8_bits:
            share_rounding(flat.specialization.graph)
        runner = _Runner(module, flat, fitting)
        if (judged_outside and runner.knows_forms()) or runner.runs_through():
            result.append(Found(number, flat, Cut(flat.specialization.graph, runner.metas), runner))
    return result


class _Runner(GraphRunner):
    """Run a graph on a recorded call, and note what nodes give."""

    def __init__(self, module: nn.Module, flat: Flat, names: Mapping[str, Any]) -> None:
        graph, read = flat.specialization.graph, reader(names)
        super().__init__(module, graph)
        self._call = {node: read(flat.specialization.argument(node)) for node in graph.find_nodes(op="placeholder")}
        self._values: dict[fx.Node, Any] = {}
        self._left = set[fx.Node]()  # of the values that are wanted, those that are not there
        self.metas: dict[fx.Node, Meta] = {}

    def runs_through(self) -> bool:
        """Say whether the graph runs in the call: a check may not hold, or an operation run elsewhere only."""
        try:
            self.run_call()
        except Exception:
            return False
        return True

    def knows_forms(self) -> bool:
        """Say whether the forms of all values are known, and note them, without a run on numbers: that the graph runs
        in the call tells who compares the model afterwards.
        """
        try:
            with torch.no_grad():
                self.metas = _Forms(self.module, cast("fx.Graph", self.graph)).found(list(self._call.values()))
        except Exception:  # what depends on numbers raises anything
            self.metas = {}
        return bool(self.metas)

    def run_call(self, wanted: Collection[fx.Node] = ()) -> None:
        """Run the graph, as far as to the last of the nodes that are wanted; keep what it gives at these."""
        self._values, self._left = dict.fromkeys(wanted), set(wanted)
        with preserved(self.module), torch.no_grad(), suppress(_Done):
            self.run(*copied(list(self._call.values())))  # a cache, too, is as it was for those that use the call next

    def values_of(self, nodes: Sequence[fx.Node]) -> list[Any]:
        """Return what nodes give in the call, each value in memory that nothing else writes into."""
        try:
            if not self._call.keys() >= set(nodes):
                self.run_call(nodes)
            found = {**self._call, **self._values}
            return [found[node] for node in nodes]
        finally:
            self._values = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.metas[n] = meta_of(value)
        if n in self._values:
            self._values[n] = value.clone() if isinstance(value, Tensor) else value
            self._left.discard(n)
            if not self._left:
                raise _Done
        return value


class _Done(Exception):
    """All wanted values are there."""


class _Forms(GraphRunner):
    """Run a graph of a model on the CPU: on tensors without numbers, where capture does not tell what a node gives."""

    def found(self, given: Sequence[Any]) -> dict[fx.Node, Meta]:
        """Return what nodes give in a call."""
        self._metas: dict[fx.Node, Meta] = {}
        self.run(*map_tensors(_without_numbers, tuple(given)))
        return self._metas

    def run_node(self, n: fx.Node) -> Any:
        known = cast("Meta", n.meta.get("val"))
        is_taken_apart = isinstance(known, tuple) and all(user.target is getitem for user in n.users)
        parts = cast("tuple[Meta, ...]", known) if is_taken_apart else (known,)
        tensors = [_of_form(each) for each in parts if isinstance(each, TensorMeta)]
        if parts and len(tensors) == len(parts):
            self._metas[n] = known
            return tuple(tensors) if is_taken_apart else tensors[0]
        value = map_tensors(_without_numbers, super().run_node(n))
        self._metas[n] = _on_cpu(meta_of(value))
        return value


def _of_form(meta: TensorMeta) -> Tensor:
    return torch.empty(meta.shape, dtype=meta.dtype, device="meta")


def _without_numbers(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def _on_cpu(meta: Meta) -> Meta:
    """Return the same description, of tensors on the CPU."""
    if isinstance(meta, TensorMeta):
        return replace(meta, device=torch.device("cpu"))
    if isinstance(meta, (tuple, list)):
        return type(meta)(map(_on_cpu, meta))
    return {key: _on_cpu(item) for key, item in meta.items()} if isinstance(meta, dict) else meta
