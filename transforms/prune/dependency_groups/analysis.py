"""The analysis: run a program, follow its dimensions, and say which units can be removed."""

from __future__ import annotations

from torch import Tensor

from ....compat import transient_buffers
from ....errors import InputError
from ....passes.timing import collection_paused
from ....runtime.graphs import Region
from ....tracing.program import Program
from .dimension_tracker import DimensionTracker
from .experts import with_experts
from .groups import Coupling
from .resolving import resolved
from .running import run

__all__ = ["coupling"]


def coupling(program: Program) -> Coupling:
    """Return the groups of units of a program that can be removed, and the layers that must stay.

    The program runs on its example inputs: from its graphs in each mode that has its own, and by its modules' own
    forwards where graphs have sizes written down.

    Raises:
        InputError: if the program has no example inputs.
    """
    if not program.whole_calls:
        raise InputError("pruning needs example_inputs: what belongs together is seen in a run of the model")
    with collection_paused():
        return with_experts(program, _followed(program))


def _followed(program: Program) -> Coupling:
    """Return the groups that a run of a program shows."""
    tracker = DimensionTracker(_tensors(program))
    ran = run(program, tracker, training=program.training, graphs=True)
    known = {(name, i) for name, capture in program.captures.items() for i in range(len(capture.specializations))}
    if known - ran:
        run(program, tracker, training=not program.training, graphs=True)
    found = resolved(program, tracker)
    if not any(group.numbers for group in found.groups):
        return found
    tracker.own_forwards = True
    run(program, tracker, training=program.training, graphs=False)
    return resolved(program, tracker)


def _tensors(program: Program) -> dict[int, tuple[str, Tensor]]:
    """Return the parameters and buffers that may be cut, by identity, with their first names."""
    borrowed = tuple(f"{name}." for name, module in program.names.modules.items() if isinstance(module, Region))
    transient = {
        f"{name}.{buffer}" if name else buffer
        for name, module in program.names.modules.items()
        for buffer in transient_buffers(module)
    }
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in program.names.registered().items():
        if tensor.is_floating_point() and name not in transient and not name.startswith(borrowed):
            found.setdefault(id(tensor), (name, tensor))
    return found
