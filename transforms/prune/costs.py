"""What a model costs with some units gone, which sites tell the report: parameters, operations or latency."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from ...compat import all_modules, fake_tensors
from ...errors import BudgetError
from ...operators import counted_flops
from ...passes.rewriting import Edit
from ...passes.sites import Site
from ...passes.timing import Runner, time_candidates
from ...runtime.values import qualified, tensors_by_name
from ...tracing.isolation import copied_module, shallow_clone
from ...tracing.program import Program, deactivate
from .dependency_groups import Group
from .options import Options
from .sites import Chosen, kept_indices, sites_of
from .write import rewrite

__all__ = ["Cost", "DoesNotRun", "cost_of", "multiples_of", "with_costs"]

_SECONDS = 0.1
"""So long the two models are timed beside each other, at each step."""

_TAKEN_BYTES = 16
"""Kernels that multiply stacked matrices, such as `grouped_mm`, take strides in multiples of so many bytes."""

Cost = Callable[[Sequence[Chosen]], float]


class DoesNotRun(Exception):  # a signal between two modules, turned into refusals by one
    """A model does not run any more once units are gone; `reasons` has by group what it raises then."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__(f"without units of {', '.join(reasons)} the model does not run")
        self.reasons = reasons


def cost_of(program: Program, target: str) -> Cost:
    """Return what says what a model costs where units are kept; BudgetError: it takes a run, and has no inputs."""
    if target == "units":
        return lambda chosen: float(sum(len(each.kept) for each in chosen))
    if target == "parameters":
        return lambda chosen: float(sum(map(math.prod, _shapes_left(program.model, chosen).values())))
    if not program.whole_calls:
        raise BudgetError(f"target={target} needs example_inputs, on which the model is run")
    measure = _operations(program) if target == "flops" else _share_of_time(program)
    known: dict[tuple[tuple[int, ...], ...], float] = {}

    def cost(chosen: Sequence[Chosen]) -> float:
        kept = tuple(each.kept for each in chosen)
        if kept not in known:
            known[kept] = _measured(program, chosen, measure)
        return known[kept]

    return cost


def _shapes_left(model: nn.Module, chosen: Sequence[Chosen]) -> dict[str, list[int]]:
    """Return the shape that each parameter has where units are kept, by its first name; nothing is cut for that."""
    tensors = tensors_by_name(model)
    gone: dict[tuple[int, int], set[int]] = defaultdict(set)
    for each in chosen:
        kept = set(each.kept)
        for cut in each.group.cuts if len(kept) < each.group.size else ():
            places = set(range(len(cut.units))) - set(kept_indices(cut.units, kept))
            gone[id(tensors[cut.tensor]), cut.dim].update(places)
    return {
        name: [size - len(gone.get((id(tensor), dim), ())) for dim, size in enumerate(tensor.shape)]
        for name, tensor in model.named_parameters()
    }


def _operations(program: Program) -> Callable[[nn.Module], float]:
    """Return what counts a model's floating-point operations: without data, where its code does not look into any."""
    model = shallow_clone(program.model).eval()
    try:
        with fake_tensors():
            _counted(model, program)
    except Exception:  # whatever code raises that looks into tensors
        return lambda model: _counted(copied_module(model).eval(), program)

    def count(model: nn.Module) -> float:
        with fake_tensors():
            return _counted(model.eval(), program)

    return count


def _counted(model: nn.Module, program: Program) -> float:
    with torch.no_grad(), counted_flops() as counter:
        for call in program.whole_calls:
            model(*call.args, **call.kwargs)
    return float(counter.get_total_flops())


def _share_of_time(program: Program) -> Callable[[nn.Module], float]:
    """Return what says what a call takes, as a share of what one of the whole model takes; both are timed in turn."""
    baseline = shallow_clone(program.model)

    def share(pruned: nn.Module) -> float:
        for model in (baseline, pruned):
            deactivate(all_modules(model))
        runners = {
            name: Runner(model, program.whole_calls, training=program.training)
            for name, model in (("before", baseline), ("after", pruned))
        }
        return 1 / time_candidates(runners, seconds=_SECONDS).ratio("before", "after").mid

    return share


def _measured(program: Program, chosen: Sequence[Chosen], measure: Callable[[nn.Module], float]) -> float:
    """Return what is measured with units gone; DoesNotRun names the groups that the model does not run without."""
    try:
        return measure(_pruned(program, chosen))
    except Exception as error:  # whatever the model's code raises
        reasons: dict[str, str] = {}
        for each in chosen if len(chosen) > 1 else ():
            try:
                _measured(program, [each], measure)
            except DoesNotRun as alone:
                reasons |= alone.reasons
        raise DoesNotRun(reasons or dict.fromkeys((each.group.name for each in chosen), _shown(error))) from error


def _shown(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"without its units the model does not run: {type(error).__name__}: {first}"


def multiples_of(program: Program, groups: Sequence[Group], round_to: int) -> list[int]:
    """Return of how many units a multiple stays in each group; a run tells whether stacked matrices need that."""
    alignments = [_alignment(program.model, group) for group in groups]
    odd = [Chosen(g, tuple(range(g.size - 1))) for g, each in zip(groups, alignments, strict=True) if each > 1]
    if not odd or _runs(program, odd):
        return [round_to] * len(groups)
    return [math.lcm(round_to, each) for each in alignments]


def _alignment(model: nn.Module, group: Group) -> int:
    """Return how many units have whole 16 bytes in every stacked matrix whose rows or columns a group cuts."""
    if group.kind not in ("channels", "hidden") or group.size < 2:
        return 1
    tensors = tensors_by_name(model)
    cuts = [tensors[cut.tensor] for cut in group.cuts if cut.dim]
    sizes = [each.element_size() for each in cuts if isinstance(each, nn.Parameter) and each.dim() == 3]
    return math.lcm(1, *(max(1, _TAKEN_BYTES // size) for size in sizes))


def _runs(program: Program, chosen: Sequence[Chosen]) -> bool:
    """Say whether the model runs on its example inputs with units gone."""
    model = copied_module(_pruned(program, chosen)).eval()
    try:
        with torch.no_grad():
            for call in program.whole_calls:
                model(*call.args, **call.kwargs)
    except Exception:  # whatever the model's code raises
        return False
    return True


def _pruned(program: Program, chosen: Sequence[Chosen]) -> nn.Module:
    """Return a copy of the model in which the units are gone."""
    copied = Program(shallow_clone(program.model), program.inputs, dict(program.opaque), training=program.training)
    for site in sites_of(program, chosen):
        there = Site.from_json(copied, site.to_json())
        edit = Edit(copied, there, "prune")
        rewrite(there.read_through(edit.own_graphs), edit)
        edit.finish()
    return copied.model


def with_costs(
    model: nn.Module, chosen: Sequence[Chosen], sites: Sequence[Site], wanted: Options, cost: Cost
) -> Iterator[Site]:
    """Yield the sites with what they save, should one be undone; the first one also with what all of them are for."""
    shapes, parameters = _shapes_left(model, chosen), dict(model.named_parameters())
    sizes = {name: parameter.element_size() for name, parameter in parameters.items()}
    before_after = [{name: each.shape for name, each in parameters.items()}, shapes]
    costs: dict[str, list[float]] = {
        "units": [sum(each.group.size for each in chosen), sum(len(each.kept) for each in chosen)],
        "parameters": [sum(map(math.prod, left.values())) for left in before_after],
        "bytes": [sum(sizes[name] * math.prod(shape) for name, shape in left.items()) for left in before_after],
    }
    if wanted.target not in costs:
        whole = [Chosen(each.group, tuple(range(each.group.size))) for each in chosen]
        costs[wanted.target] = [cost(whole), cost(chosen)]
    of_all = {"costs": costs, "asked": [wanted.amount, wanted.target]}
    for number, site in enumerate(sites):
        yield replace(site, data={**site.data, "saves": _saved(site, shapes, sizes), **({} if number else of_all)})


def _saved(site: Site, left: Mapping[str, Sequence[int]], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return what a site saves where all others stand, with shapes that are left, and bytes of an element."""
    without: dict[str, list[int]] = {}
    for name, dim, size, _ in site.data["tensors"]:
        path = qualified(site.owner, name)
        if path in left:
            without.setdefault(path, list(left[path]))[dim] = size
    more = {path: math.prod(shape) - math.prod(left[path]) for path, shape in without.items()}
    return {
        "units": sum(size - len(kept) for _, size, kept in site.data["units"].values()),
        "parameters": sum(more.values()),
        "bytes": sum(sizes[path] * count for path, count in more.items()),
    }
