"""Write ensembles into the graphs of their owner: stack their tensors, and leave live views in the old places."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx, nn

from ...compat import own_children
from ...errors import MatchFailure
from ...layers.members import FusedMembers, settings_of, vector_size, ways_to
from ...passes.rewriting import Edit, leave_views, stack_members
from ...passes.sites import Site
from ...runtime.graphs import capture_of, required_capture
from .inlining import Known, Operation
from .lowerings import LoweringRule, Task, Unit, Writer, leaving_units, rebuild, rule_called
from .search import (
    Case,
    Ensemble,
    Parameters,
    Place,
    Shared,
    find_ensembles,
    places_of,
    present_cases,
    rewritten_specializations,
)

__all__ = ["common_name", "fuse"]


def fuse(sites: Sequence[Site], edit: Edit) -> None:
    """Rewrite sites of one owner, those of the same graphs at once; `edit.failed_at` is one that cannot be written."""
    left = list(sites)
    while left:
        together = _written_at_once([_located(site, edit) for site in left])
        _rewrite(together, edit)
        left = left[len(together) :]


def _written_at_once(located: Sequence[_Located]) -> Sequence[_Located]:
    """Return the first ensembles that are computed in the same graphs and share no operation, as one sum of both."""
    covered: set[Operation] = set()
    for number, each in enumerate(located):
        operations = {operation for place in each.places for operation in place.ensemble.covered}
        if each.cases != located[0].cases or covered & operations:
            return located[:number]
        covered |= operations
    return located


@dataclass(frozen=True)
class _Located:
    """A site's ensemble in the graphs as they are now."""

    site: Site
    rule: LoweringRule
    ensemble: Ensemble
    places: Sequence[Place]

    @property
    def cases(self) -> list[Case]:
        return [place.case for place in self.places]


def _rewrite(located: Sequence[_Located], edit: Edit) -> None:
    """Rewrite ensembles that are computed in the same graphs and modes."""
    stacks = [_stacked(each, edit) for each in located]
    rows = list(zip(*(each.places for each in located), strict=True))
    names = [{tuple(names): f"{child}.{place}" for place, names in places.items()} for places, _, child in stacks]
    graphs = [_lowered(row, located, names, edit) for row in rows]
    site = located[0].site
    edit.set_specializations(
        *rewritten_specializations(rows, graphs, required_capture(site.program.module(site.owner)).specializations)
    )
    for each, (places, store, _) in zip(located, stacks, strict=True):
        inlined = dict.fromkeys(path for place in each.places for path in place.inlined_modules(edit.owner))
        leave_views(places, store, edit, partial(_seals, inlined, store, edit))


def _stacked(located: _Located, edit: Edit) -> tuple[dict[str, tuple[str, ...]], FusedMembers, str]:
    """Stack the members' tensors in one new child; return which are where in it, the child and its name."""
    ensemble, places = located.ensemble, _store_names(located.ensemble)
    linears = (pack.operands for pack in ensemble.packs if located.rule.input_first and pack.operator == "linear")
    moved = {w.names for x, w, *_ in linears if isinstance(x, Shared) and isinstance(w, Parameters)}

    def laid_out(place: str, tensor: torch.Tensor) -> torch.Tensor:
        # [N, out, in], in memory as [in, N, out]
        return tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0) if places[place] in moved else tensor

    name = f"{common_name(ensemble)}_fused".replace(".", "_")
    return places, *stack_members(places, edit, name, laid_out=laid_out)


def _seals(inlined: Iterable[str], store: FusedMembers, edit: Edit, views: Iterable[str]) -> dict[str, set[str]]:
    """Return what must stay: the ways to members, and what would have no effect on members and inlined modules."""
    holder, sealed = edit.holder, ways_to(views)
    if holder.regions:  # they would go on with the store that they borrowed
        children = own_children(holder.module).items()
        sealed.setdefault("", set()).update(name for name, child in children if child is store)
    for path in inlined:
        settings = _settings(holder.module.get_submodule(path))
        sealed.setdefault(path, set()).update((*settings, "forward", "__class__"))
    return sealed


def _lowered(
    row: Sequence[Place], located: Sequence[_Located], names: Sequence[Mapping[tuple[str, ...], str]], edit: Edit
) -> fx.Graph:
    """Return a graph of the owner with the ensembles in it written as batched operations."""
    site, inlined = located[0].site, row[0].inlined
    units: list[Unit] = []
    covered: set[Operation] = set()
    for place, each, stacked in zip(row, located, names, strict=True):
        name = f"vectorized_{common_name(place.ensemble)}".replace(".", "_")
        vectors = {stack: size for stack in stacked.values() if (size := vector_size(edit.owner, stack))}
        add_module = partial(edit.add_module, name=name)
        task = Task(place.ensemble, stacked, vectors, add_module, place.inlined.may_restart)
        with edit.at(each.site):
            units += [_of_site(u, each.site, edit) for u in (*each.rule.write(task), *leaving_units(task))]
        covered |= task.ensemble.covered
    return rebuild(site.program.graph(site.owner, row[0].case.specialization), inlined, units, covered)


def _of_site(unit: Unit, site: Site, edit: Edit) -> Unit:
    """Let what a unit writes, and what it cannot write, be known as the site's."""

    def emit(writer: Writer) -> None:
        with edit.at(site):
            last = next(reversed(writer.graph.nodes), None)
            unit.emit(writer)
            for node in itertools.takewhile(lambda node: node is not last, reversed(writer.graph.nodes)):
                edit.sign(node)

    return dataclasses.replace(unit, emit=emit)


def _located(site: Site, edit: Edit) -> _Located:
    """Find the site's ensemble again in the graph as it is now: calls may have been written out since."""
    case = next(case for case in present_cases(site.program, site.owner) if case.specialization == site.specialization)
    known, key = site.program.analyses[_Members], (site.owner, site.specialization)
    if key not in known:
        known[key] = {
            frozenset(_written_out(member.name) for pack in ensemble.packs for member in pack.members): ensemble
            for ensemble in find_ensembles(site.program, *key)
        }
    ensemble = known[key].get(frozenset(map(_written_out, site.nodes.values())))
    with edit.at(site):
        if ensemble is None:
            raise MatchFailure("an earlier rewrite already uses some of its members")
        rule = rule_called(site.choice or site.choices[0])
        return _Located(site, rule, ensemble, places_of(ensemble, case, site.program, site.owner))


class _Members(Known[tuple[str, int], dict[frozenset[str], Ensemble]]):
    """The ensembles of each graph by the names of their members' operations."""


def _written_out(name: str) -> str:
    """Return the name that an operation inside an inlined call gets as a node of the owner."""
    return name.replace("/", "_")


def _settings(module: nn.Module) -> Iterable[str]:
    """Return the attributes of a module that its graph was read from: its children, and settings such as a slope."""
    capture = capture_of(module)
    if capture is not None:
        return *own_children(module), *capture.reads
    return settings_of(module)


def _store_names(ensemble: Ensemble) -> dict[str, tuple[str, ...]]:
    """Name each stacked parameter after its place within a member: `heads.*.0.weight` becomes `0.weight`."""
    operands = list(ensemble.parameters)
    shared = len(_common_prefix([name.split(".") for operand in operands for name in operand.names]))
    names: dict[str, tuple[str, ...]] = {}
    for operand in operands:
        columns = list(zip(*(name.split(".") for name in operand.names), strict=False))[shared:-1]
        place = [column[0] for column in columns if len(set(column)) == 1]
        last = operand.names[0].rpartition(".")[2]
        names[next(n for n in _numbered(place, last) if n not in names)] = operand.names
    return names


def _numbered(place: Sequence[str], last: str) -> Iterator[str]:
    yield ".".join([*place, last])
    for number in itertools.count(1):
        yield ".".join([*place, f"other_{number}", last])


def common_name(ensemble: Ensemble) -> str:
    """Return the container that the members have in common, or `members`."""
    names = (name for operand in ensemble.parameters for name in operand.names)
    prefix = _common_prefix([name.split(".")[:-1] for name in names])
    return ".".join(prefix) or "members"


def _common_prefix(paths: Iterable[Sequence[str]]) -> tuple[str, ...]:
    every = [tuple(path) for path in paths]
    first, last = min(every), max(every)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]
