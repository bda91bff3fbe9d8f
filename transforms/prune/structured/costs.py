"""What a model costs with some units gone: its parameters, floating-point operations or latency."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import nn

from ....compat import all_modules, fake_tensors
from ....errors import BudgetError
from ....operators import counted_flops
from ....passes.rewriting import Edit
from ....passes.sites import Site
from ....passes.state import copied_module, twin
from ....passes.timing import runner, time_candidates
from ....tracing.program import Program, deactivate
from ....tracing.values import tensors_by_name
from .removal import remove
from .sites import Chosen, kept_indices, sites_of

__all__ = ["cost_of", "costs", "parameters_left"]

_SECONDS = 0.1
"""So long the two models are timed beside each other, at each step."""

Cost = Callable[[Sequence[Chosen]], float]


def cost_of(program: Program, target: str) -> Cost:
    """Return the function that says what a model costs where units are kept."""
    if target == "parameters":
        return lambda chosen: float(parameters_left(program.model, chosen))
    if not program.whole_calls:
        raise BudgetError(f"target={target} needs example_inputs, on which the model is run")
    if target == "flops":
        return lambda chosen: flops(_pruned(program, chosen))
    baseline = twin(program.model)
    return lambda chosen: _share_of_time(program, baseline, _pruned(program, chosen).model)


def parameters_left(model: nn.Module, chosen: Sequence[Chosen]) -> int:
    """Return how many parameters a model has where units are kept; nothing is cut for that."""
    tensors = tensors_by_name(model)
    gone: dict[tuple[int, int], set[int]] = defaultdict(set)
    for each in chosen:
        kept = set(each.kept)
        for cut in each.group.cuts:
            places = set(range(len(cut.units))) - set(kept_indices(cut.units, kept))
            gone[id(tensors[cut.tensor]), cut.dim].update(places)
    total = 0
    for tensor in {id(tensor): tensor for tensor in tensors.values() if isinstance(tensor, nn.Parameter)}.values():
        count = 1
        for dim, size in enumerate(tensor.shape):
            count *= size - len(gone.get((id(tensor), dim), ()))
        total += count
    return total


def flops(program: Program) -> float:
    """Return the floating-point operations of the example calls; no data is computed where that can be helped."""
    model = copied_module(program.model).eval()
    try:
        with fake_tensors():
            return _counted(model, program)
    except Exception:  # code that looks into tensors
        return _counted(model, program)


def _counted(model: nn.Module, program: Program) -> float:
    with torch.no_grad(), counted_flops() as counter:
        for call in program.whole_calls:
            model(*call.args, **call.kwargs)
    return float(counter.get_total_flops())


def costs(program: Program, chosen: Sequence[Chosen]) -> dict[str, list[float]]:
    """Return what the model costs before and after, as far as that can be counted, for the report."""
    found = {"parameters": [float(parameters_left(program.model, some)) for some in ((), chosen)]}
    if program.whole_calls:
        with suppress(Exception):  # it is the report's alone
            found["flops"] = [flops(program), flops(_pruned(program, chosen))]
    return found


def _share_of_time(program: Program, baseline: nn.Module, pruned: nn.Module) -> float:
    """Return what a call takes, as a share of what one of the whole model takes; both are timed in turn."""
    for model in (baseline, pruned):
        deactivate(all_modules(model))
    runners = {
        name: runner(model, program.whole_calls, training=program.training)
        for name, model in (("before", baseline), ("after", pruned))
    }
    return 1 / time_candidates(runners, seconds=_SECONDS).ratio("before", "after").mid


def _pruned(program: Program, chosen: Sequence[Chosen]) -> Program:
    """Return a program in which the units are gone, on a copy of the model."""
    copied = Program(
        twin(program.model), program.inputs, dict(program.opaque), training=program.training,
    )  # fmt: skip
    for site in sites_of(program, chosen):
        there = Site.from_json(copied, site.to_json())
        edit = Edit(copied, there, "prune")
        remove(there.read_through(edit.own_graphs), edit)
        edit.finish()
    return copied
