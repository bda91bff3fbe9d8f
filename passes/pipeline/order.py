"""Which pass must run before which: refuse an order, or a company, that passes have ruled out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from ...errors import OrderError, UsageError
from ...runtime.record import Decision
from ..contract import Pass
from ..sites import Phase
from .registry import find_pass

__all__ = ["arranged", "beside_presets", "check_behind", "check_order"]

Rule = tuple[int, int, str]
"""Positions of two passes in the list, the first of which must run before the second, and why."""


def check_order(passes: Sequence[Pass]) -> None:
    """Raise OrderError unless passes may run together in this order; the message names one that works if there is one.

    A pass that rewrites may be listed more than once, one that acts on the finished model may not.
    """
    _check_phases(passes)
    _check_required(passes)
    _check_finished_once(passes)
    rules = list(_rules(passes))
    broken = [rule for rule in rules if rule[0] > rule[1]]
    if not broken:
        return
    pairs = {rule[:2] for rule in rules}
    worst = next((rule for rule in broken if (rule[1], rule[0]) in pairs), broken[0])  # those two fit in no order
    early, late, why = worst
    raise OrderError(
        f"{passes[late].name!r} is listed before {passes[early].name!r}, but {why}; {_advice(passes, rules, worst)}"
    )


def arranged(passes: Sequence[Pass]) -> list[Pass]:
    """Return the passes, those whose work another `includes` behind it, unless they could no longer run there."""
    found = list(passes)
    for pass_ in passes:
        place = next(number for number, each in enumerate(found) if each is pass_)
        moves = [_moves_behind(found, number, place) for number in range(place)]
        moved = [each for each, goes in zip(found, moves, strict=False) if goes]
        before = [each for each, goes in zip(found, moves, strict=False) if not goes]
        found = [*before, pass_, *moved, *found[place + 1 :]]
    return found


def beside_presets(listed: Sequence[Sequence[Pass]]) -> list[Pass]:
    """Return all passes of the `listed` names or values in an order that their rules allow, where there is one.

    What comes first stays if it may. Else passes beside the longest preset move: before its own pass of that name, or
    as far from where they are listed as their rules demand.
    """
    plain = [pass_ for group in listed for pass_ in group]
    if len(listed) < 2 or max(map(len, listed)) < 2 or _is_allowed(arranged(plain)):
        return arranged(plain)
    base = max(range(len(listed)), key=lambda number: len(listed[number]))
    found, ahead = list(listed[base]), sum(len(group) for group in listed[:base])
    named = [pass_ for number, group in enumerate(listed) if number != base for pass_ in group]
    earliest = 0
    for count, pass_ in enumerate(named):
        wanted = earliest if count < ahead else len(found)
        place = next(_places(found, pass_, wanted, earliest), None)
        if place is None:
            return arranged(plain)  # whose order is refused, with the reason
        found.insert(place, pass_)
        earliest = place + 1
    return arranged(found)


def _places(found: Sequence[Pass], pass_: Pass, wanted: int, earliest: int) -> Iterator[int]:
    """Yield where a pass may stand among others: before one of its name, then nearest to a place."""
    alike = [number for number, each in enumerate(found) if each.name == pass_.name and number >= earliest][:1]
    near = sorted(range(earliest, len(found) + 1), key=lambda place: abs(place - wanted))
    for place in (*alike, *near):
        if _is_allowed(arranged([*found[:place], pass_, *found[place:]])):
            yield place


def _is_allowed(passes: Sequence[Pass]) -> bool:
    return all(early < late for early, late, _ in _rules(passes))


def _moves_behind(found: Sequence[Pass], number: int, place: int) -> bool:
    """Say whether a pass runs behind a later one that includes its work."""
    name = found[number].name
    between = found[number + 1 : place]
    return name in found[place].includes and not any(name in each.destroys for each in between)


def check_behind(decisions: Iterable[Decision], passes: Sequence[Pass]) -> None:
    """Raise OrderError where a pass that an earlier call applied has ruled out one of these."""
    applied = dict.fromkeys(decision.pass_name for decision in decisions if decision.status == "applied")
    for name, earlier in ((name, _known(name)) for name in applied):
        for pass_ in passes if earlier.destroys_later else ():
            if pass_.name in earlier.destroys:
                raise OrderError(
                    f"pass {pass_.name!r}: the model has been through {name!r} in an earlier call, and {pass_.name!r} "
                    f"cannot run behind that: {earlier.destroys[pass_.name]}; give fxopt.restore(model), or list "
                    f"{pass_.name},{name} in one call"
                )


def _known(name: str) -> type[Pass]:
    """Return the class of a pass by its name; `Pass` for what goes by a name of its own, such as a user's function."""
    try:
        return find_pass(name)
    except UsageError:
        return Pass


def _check_phases(passes: Sequence[Pass]) -> None:
    evaluation = next((p.name for p in passes if p.phase is Phase.EVAL), None)
    training = next((p.name for p in passes if p.phase is Phase.TRAIN), None)
    if evaluation and training:
        raise OrderError(
            f"{evaluation!r} and {training!r} cannot be used together: "
            f"{evaluation!r} needs evaluation mode, {training!r} is for training"
        )


def _check_required(passes: Sequence[Pass]) -> None:
    names = [p.name for p in passes]
    for name, needed in ((p.name, needed) for p in passes for needed in p.requires):
        if needed not in names:
            raise OrderError(f"{name!r} needs {needed!r} to have run before it; list it first: {needed},{name}")


def _check_finished_once(passes: Sequence[Pass]) -> None:
    names = [p.name for p in passes if p.finishes]
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise OrderError(f"{twice!r} is listed twice, and a model is finished once; leave one out")


def _rules(passes: Sequence[Pass]) -> Iterator[Rule]:
    for i, j in combinations(range(len(passes)), 2):
        for own, other in ((i, j), (j, i)):
            a, b = passes[own], passes[other].name
            if a.finishes and not passes[other].finishes:
                yield other, own, f"{a.name!r} acts on the finished model, so it must run after {b!r}"
            # What is left by a pass that includes its work runs behind that, so late.
            if b in a.before and not any(a.name in earlier.includes for earlier in passes[:own]):
                yield own, other, f"{a.name!r} must run before {b!r}"
            if b in a.after:
                yield other, own, f"{a.name!r} must run after {b!r}"
            if b in a.requires:
                yield other, own, f"{a.name!r} needs {b!r} to have run before it"
            if b in a.destroys:
                yield other, own, f"once {a.name!r} has run, {b!r} no longer can: {a.destroys[b]}"


def _advice(passes: Sequence[Pass], rules: Sequence[Rule], broken: Rule) -> str:
    """Return the nearest order that keeps all rules, or the rule that makes the broken one impossible to keep."""
    import networkx as nx  # a third of a second, for one message

    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(passes)))
    graph.add_edges_from((early, late) for early, late, _ in rules)
    if nx.is_directed_acyclic_graph(graph):
        order = nx.lexicographical_topological_sort(graph)
        return f"use {','.join(str(passes[i]) for i in order)}"
    opposite = next((why for early, late, why in rules if (early, late) == (broken[1], broken[0])), None)
    if opposite is None:
        return "and no other order works either"
    return f"the other order is not possible either: {opposite}, so they cannot be used together"
