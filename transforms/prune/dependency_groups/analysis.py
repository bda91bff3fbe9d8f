"""The analysis: run a program, follow its dimensions, and put together which units can be removed."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ....collection import collection_paused
from ....compat import transient_buffers
from ....errors import InputError
from ....runtime.graphs import Region
from ....runtime.values import qualified
from ....tracing.program import Program
from .dimension_tracker import DimensionTracker
from .experts import with_experts
from .groups import Coupling
from .running import run
from .sizes import assigned, broken
from .writing import Writer, given_in_graph, grouped

__all__ = ["coupling"]


def coupling(program: Program) -> Coupling:
    """Return the groups of units that can be removed, and the layers that must stay; InputError: no example inputs."""
    if not program.whole_calls:
        raise InputError("pruning needs example_inputs: a run of the model shows which tensors belong together")
    with collection_paused():
        return with_experts(program, _followed(program))


def _followed(program: Program) -> Coupling:
    """Return the groups that a run of a program shows."""
    tracker = DimensionTracker(_tensors(program))
    ran = run(program, tracker, training=program.training)
    known = {(name, i) for name, capture in program.captures.items() for i in range(len(capture.specializations))}
    if known - ran:
        run(program, tracker, training=not program.training)
    found = _resolved(program, tracker)
    if not any(group.numbers for group in found.groups):
        return found
    tracker.own_forwards = True
    run(program, tracker, training=program.training)
    return _resolved(program, tracker)


def _tensors(program: Program) -> dict[int, tuple[str, Tensor]]:
    """Return the parameters and buffers that may be cut, by identity, with their first names."""
    modules = program.names.modules
    borrowed = tuple(f"{name}." for name, module in modules.items() if isinstance(module, Region))
    transient = {qualified(name, buffer) for name, module in modules.items() for buffer in transient_buffers(module)}
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in program.names.registered().items():
        if tensor.is_floating_point() and name not in transient and not name.startswith(borrowed):
            found.setdefault(id(tensor), (name, tensor))
    return found


def _resolved(program: Program, tracker: DimensionTracker) -> Coupling:
    """Return the groups that a run's findings leave."""
    while True:
        solution = tracker.solve()
        units = [solution.of(dimension.atoms) for dimension in tracker.dimensions]
        grouping = grouped(tracker, units)
        known = assigned(tracker.requirements, solution)
        wrong = list(broken(tracker.requirements, known, solution, grouping.group))
        fatal = [each for each in wrong if not each.requirement.own and given_in_graph(each.requirement) is None]
        if not fatal:
            return Writer(program, tracker, solution, units, grouping, known, wrong).coupling()
        for each in fatal:
            tracker.fix(np.flatnonzero(grouping.group == each.group), each.why)
