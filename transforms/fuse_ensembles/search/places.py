"""Where an ensemble is computed: a owner may have several graphs, and its parameters are stacked for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx, nn

from ....compat import modules_by_name, submodule
from ....errors import MatchFailure
from ....runtime.graphs import Specialization, capture_of, copy_graph, required_capture
from ....runtime.guards import Guard
from ....tracing.program import Program
from ..inlining import InlinedGraph, Known, inlined_graph
from .isomorphism import find_ensembles
from .packs import Ensemble

__all__ = ["Case", "Place", "places_of", "present_cases", "rewritten_specializations"]


@dataclass(frozen=True)
class Case:
    """One of a owner's graphs in one mode."""

    specialization: int
    flipped: bool  # whether every module is in the other mode than now
    asks: bool  # whether the graph itself is for one mode only


class _Cases(Known[str, list[Case]]):
    """The cases of each owner."""


def cases_of(program: Program, owner: str) -> list[Case]:
    """Return every graph of a owner in each mode that it runs in, those that run in the present mode first."""
    known = program.analyses[_Cases]
    if owner not in known:
        module = program.module(owner)
        known[owner] = [
            Case(number, flipped, any(guard.asks_for_training for guard in specialization.guards))
            for flipped in (False, True)
            for number, specialization in enumerate(required_capture(module).specializations)
            if specialization.runs_in_mode(module, flipped=flipped)
        ]
    return known[owner]


@dataclass(frozen=True, eq=False)
class Place:
    """An ensemble in one graph of its owner, and in one mode."""

    case: Case
    inlined: InlinedGraph
    ensemble: Ensemble  # the members as they are there

    @property
    def assumed(self) -> tuple[Guard, ...]:
        """Return what the members take for granted (modes of modules in them, globals) as guards of the owner."""
        calls = dict.fromkeys(member.call for pack in self.ensemble.packs for member in pack.members)
        guards = (guard for call in calls for guard in self.inlined.assumed.get(call, ()))
        return tuple(dict.fromkeys(guards))

    def inlined_modules(self, owner: nn.Module) -> Iterator[str]:
        """Yield the modules of which the graph calls no longer anything but parts, once it is rewritten."""
        covered = sorted(self.ensemble.covered, key=lambda operation: operation.index)
        for operation in covered:
            if operation.kind == "call_module":
                path = str(operation.target)
                module = submodule(owner, path)
                yield from (
                    f"{path}.{name}".rstrip(".") for name in ({} if module is None else modules_by_name(module))
                )
        for call in dict.fromkeys(operation.call for operation in covered):
            yield from self.inlined.modules.get(call, ())

    def is_for_training(self, *, now: bool) -> bool:
        """Say whether it may run in training, given the owner's mode `now`."""
        depends = self.case.asks or any(guard.asks_for_training for guard in self.assumed)
        return not depends or now is not self.case.flipped


def present_cases(program: Program, owner: str) -> list[Case]:
    """Return the graphs of a owner that may run in its present mode."""
    return [case for case in cases_of(program, owner) if not case.flipped]


def places_of(ensemble: Ensemble, case: Case, program: Program, owner: str) -> list[Place]:
    """Return where an ensemble is computed in all graphs of its owner and in both modes; raise where one differs."""
    places = [Place(case, inlined_graph(program, owner, case.specialization, flipped=case.flipped), ensemble)]
    wanted = set(ensemble.parameters)
    for other in cases_of(program, owner):
        if other == case or _is_covered(other, places):
            continue
        inlined = inlined_graph(program, owner, other.specialization, flipped=other.flipped)
        found = find_ensembles(program, owner, other.specialization, flipped=other.flipped)
        same = next((each for each in found if set(each.parameters) == wanted), None)
        if same is not None:
            places.append(Place(other, inlined, same))
        elif _is_for_one_mode(places[0], other, program.module(owner)):
            continue
        elif _reads_any(inlined, [name for operand in ensemble.parameters for name in operand.names]):
            raise MatchFailure(f"{_described(other, program, owner)} uses its members in another way")
    return places


def rewritten_specializations(
    rows: Sequence[Sequence[Place]], graphs: Sequence[fx.Graph], before: Sequence[Specialization]
) -> tuple[list[Specialization], list[int]]:
    """Return all graphs of an owner, those of `rows` rewritten, and the numbers of those they were made from."""
    replaced = {row[0].case.specialization for row in rows}
    specializations = [
        specialization
        if number in replaced
        else dataclasses.replace(specialization, graph=copy_graph(specialization.graph))
        for number, specialization in enumerate(before)
    ]
    made_from, rewritten = list(range(len(before))), set[int]()
    for row, graph in zip(rows, graphs, strict=True):
        number = row[0].case.specialization
        old = before[number]
        guards = dict.fromkeys((*old.guards, *(guard for place in row for guard in place.assumed)))
        new = dataclasses.replace(old, guards=tuple(guards), graph=graph)
        if number in rewritten:
            specializations.append(new)
            made_from.append(number)
        else:
            specializations[number] = new
        rewritten.add(number)
    return specializations, made_from


def _is_covered(case: Case, places: Sequence[Place]) -> bool:
    """Say whether the same graph was looked at in a mode on which nothing in the members depends."""
    known = [place for place in places if place.case.specialization == case.specialization]
    return bool(known) and not any(guard.asks_for_training for place in known for guard in place.assumed)


def _is_for_one_mode(place: Place, other: Case, owner: nn.Module) -> bool:
    """Say if a module in the members has no graph in the other mode: there the original forward runs, on slices."""
    if not other.flipped or place.case.flipped:
        return False
    calls = dict.fromkeys(member.call for pack in place.ensemble.packs for member in pack.members)
    inside = (owner.get_submodule(path) for call in calls for path in place.inlined.modules.get(call, ()))
    return any(
        capture is not None and not any(each.runs_in_mode(module, flipped=True) for each in capture.specializations)
        for module in inside
        for capture in [capture_of(module)]
    )


def _reads_any(inlined: InlinedGraph, names: Sequence[str]) -> bool:
    """Say whether a graph reads one of these tensors, itself or in a call that stays closed."""
    tensors = frozenset(names)
    for operation in inlined.operations:
        target = f"{operation.target}"
        if operation.kind == "get_attr" and target in tensors:
            return True
        if operation.kind == "call_module" and any(name.startswith(f"{target}.") for name in names):
            return True
    return False


def _described(case: Case, program: Program, owner: str) -> str:
    training = program.module(owner).training is not case.flipped
    kind = "the graph" if len(program.captures[owner].specializations) == 1 else f"graph {case.specialization}"
    return f"{kind} of this module in {'training' if training else 'evaluation'}"
