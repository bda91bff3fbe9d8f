"""Where regions are that an engine may compute: in modules of which the graph, with all that it calls, is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from ...layers.delegated import DelegatedRegion
from ...passes.sites import Cause, Phase, Refusal, Site
from ...runtime.graphs import Region, required_capture
from ...runtime.guards import reader
from ...runtime.values import Arguments, Meta, meta_of, qualified
from ...tracing.isolation import preserved
from ...tracing.program import GraphRunner, Program, is_called
from ..flatten_calls import Flat, flattened
from .regions import Cut

__all__ = ["Found", "found_in", "look"]


@dataclass(frozen=True, eq=False)
class Found:
    """A graph of a module with what it calls written out, and cut into regions."""

    number: int
    flat: Flat
    cut: Cut
    prepared: dict[Any, DelegatedRegion] = field(default_factory=dict[Any, "DelegatedRegion"])  # by engine and place


def found_in(program: Program, engines: Sequence[str], *, required: bool) -> Iterator[Site | Refusal]:
    """Yield the outermost modules that have regions for an engine, and why others have none."""
    if program.training:
        yield Refusal("the model is in training; call model.eval() first", "(root)", Cause.IN_TRAINING)
        return
    if not program.inputs:
        yield Refusal("no example_inputs, which an engine is prepared for and compared on", "(root)")
        return
    opened: set[str] = set()
    for owner in sorted(program.captures, key=lambda name: (name.count(".") + bool(name), name)):
        module = program.module(owner)
        if owner in opened or isinstance(module, Region) or not is_called(program, owner):
            continue
        found = look(program, owner)
        regions = [region for each in found for region in each.cut.regions]
        for each in found:
            closed = {path: why for path, why in each.flat.closed.items() if why}
            yield from (Refusal(why, qualified(owner, path)) for path, why in closed.items())
        if regions:
            opened |= {qualified(owner, path) for each in found for path in each.flat.opened}
            operations = sum(len(region.computed) for region in regions)
            count = f"{len(regions)} region{'s' * (len(regions) != 1)}"
            yield Site(
                program, owner, {}, phase=Phase.EVAL, choices=tuple(engines), required=required, found=found,
                detail=f"{operations} operations in {count}",
            )  # fmt: skip


def look(program: Program, owner: str) -> list[Found]:
    """Return those graphs of a module that its recorded calls in evaluation run, cut into regions."""
    module = program.module(owner)
    capture = required_capture(module)
    calls = [(call.args, call.kwargs) for call in program.recording([module]).calls.get(module, ())]
    result: list[Found] = []
    for number, specialization in enumerate(capture.specializations):
        if not specialization.runs_in_mode(module):
            continue
        named = [{"self": module, **given} for call in calls if (given := _bound(module, call)) is not None]
        fitting = next((names for names in named if specialization.fits(names)), None)
        if fitting is None:
            continue
        named_before = [each for each in result if each.flat.specialization.fits(fitting)]
        if named_before:
            continue  # an earlier graph runs
        flat = flattened(program, owner, specialization)
        metas = _metas(module, flat, fitting)
        if metas is not None:
            result.append(Found(number, flat, Cut(flat.specialization.graph, metas)))
    return result


def _bound(module: nn.Module, call: Arguments) -> Mapping[str, Any] | None:
    try:
        return required_capture(module).parameters.bind(call[0], call[1])
    except TypeError:
        return None


def _metas(module: nn.Module, flat: Flat, names: Mapping[str, Any]) -> Mapping[fx.Node, Meta] | None:
    """Return what each node of a graph gives in a call; None where it does not run through."""
    graph, read = flat.specialization.graph, reader(names)
    given = [read(flat.specialization.argument(node)) for node in graph.find_nodes(op="placeholder")]
    runner = _Runner(module, graph)
    try:
        with preserved(module), torch.no_grad():
            runner.run(*(each.clone() if isinstance(each, torch.Tensor) else each for each in given))
    except Exception:  # a check that does not hold, or what only runs elsewhere
        return None
    return runner.metas


class _Runner(GraphRunner):
    """Note what nodes give."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        super().__init__(module, graph)
        self.metas: dict[fx.Node, Meta] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.metas[n] = meta_of(value)
        return value
