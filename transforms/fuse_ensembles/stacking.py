"""Write ensembles into the graphs of their owner: stack their tensors, and leave live views in the old places."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx, nn

from ...compat import own_children, own_tensor, submodule
from ...errors import MatchFailure
from ...layers.members import FusedMembers, attach_member, settings_of, vector_size, ways_to
from ...passes.rewriting import Edit
from ...passes.sites import Site
from ...runtime.graphs import capture_of, required_capture
from ...runtime.state import Stack, merge
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

__all__ = ["common_name", "fuse", "tensor_of"]


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
    stacks = [_stack_parameters(each, edit) for each in located]
    rows = list(zip(*(each.places for each in located), strict=True))
    graphs = [_lowered(row, located, [names for _, _, names in stacks], edit) for row in rows]
    site = located[0].site
    edit.set_specializations(
        *rewritten_specializations(rows, graphs, required_capture(site.program.module(site.owner)).specializations)
    )
    for each, (store, stored, _) in zip(located, stacks, strict=True):
        inlined = [path for place in each.places for path in place.inlined_modules(edit.owner)]
        _close(_views(stored, store), inlined, edit, store)


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


def _stack_parameters(
    located: _Located, edit: Edit
) -> tuple[FusedMembers, dict[tuple[str, ...], str], dict[tuple[str, ...], str]]:
    """Stack the members' tensors in one new child; return it, the names there and those in the owner."""
    owner, ensemble = edit.owner, located.ensemble
    stored = _store_names(ensemble)
    members = {stored[o.names]: [tensor_of(owner, name) for name in o.names] for o in ensemble.parameters}
    stacked = {place: torch.stack([parameter.detach() for parameter in group]) for place, group in members.items()}
    for x, weight, *_ in (p.operands for p in ensemble.packs if located.rule.input_first and p.operator == "linear"):
        if isinstance(x, Shared) and isinstance(weight, Parameters):  # [N, out, in], in memory as [in, N, out]
            place = stored[weight.names]
            stacked[place] = stacked[place].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    parameters = {place: tensor for place, tensor in stacked.items() if isinstance(members[place][0], nn.Parameter)}
    buffers = {place: tensor for place, tensor in stacked.items() if place not in parameters}
    store = FusedMembers(parameters, {place: members[place][0].requires_grad for place in parameters}, buffers)
    child = edit.add_owned(store, name=f"{common_name(ensemble)}_fused".replace(".", "_"))
    for operand in ensemble.parameters:
        place, example = stored[operand.names], members[stored[operand.names]][0]
        step = merge(operand.names, f"{child}.{place}", example) if place in parameters else None
        edit.record_state(step or Stack(operand.names, f"{child}.{place}"))
    return store, stored, {names: f"{child}.{place}" for names, place in stored.items()}


_Views = dict[str, dict[str, tuple[FusedMembers, str, int]]]


def _views(places: dict[tuple[str, ...], str], store: FusedMembers) -> _Views:
    """Return path of a member's module -> name of its tensor -> the slice that takes its place."""
    views: _Views = {}
    for names, place in places.items():
        for index, name in enumerate(names):
            path, _, last = name.rpartition(".")
            views.setdefault(path, {})[last] = (*store.holder(place), index)
    return views


def _close(views: _Views, inlined: Iterable[str], edit: Edit, store: FusedMembers) -> None:
    """Leave views of what was stacked, and refuse changes to members and inlined modules that would have no effect."""
    holder = edit.holder
    seals, inlined = ways_to(views), dict.fromkeys(inlined)
    if holder.regions:  # they would go on with the store that they borrowed
        seals.setdefault("", set()).update(
            name for name, child in own_children(holder.module).items() if child is store
        )
    alike: dict[frozenset[str], frozenset[str]] = {}  # members have the same settings: they share one set of names
    undo: list[Callable[[], None]] = []
    try:
        for path in dict.fromkeys((*views, *seals, *inlined)):
            module, sealed = _module(holder.module, path), seals.get(path, _NOTHING)
            names = frozenset((*sealed, *_settings(module), "forward", "__class__") if path in inlined else sealed)
            undo.append(attach_member(module, views.get(path, {}), alike.setdefault(names, names)))
    finally:
        edit.on_undo(lambda: [undo.pop()() for _ in range(len(undo))])


_NOTHING: frozenset[str] = frozenset()


def _module(owner: nn.Module, path: str) -> nn.Module:
    module = submodule(owner, path)
    if module is None:
        raise LookupError(f"there is no module '{path}'")
    return module


def _settings(module: nn.Module) -> Iterable[str]:
    """Return the attributes of a module that its graph was read from: its children, and settings such as a slope."""
    capture = capture_of(module)
    if capture is not None:
        return *own_children(module), *capture.reads
    return settings_of(module)


def _store_names(ensemble: Ensemble) -> dict[tuple[str, ...], str]:
    """Name each stacked parameter after its place within a member: `heads.*.0.weight` becomes `0.weight`."""
    operands = list(ensemble.parameters)
    shared = len(_common_prefix([name.split(".") for operand in operands for name in operand.names]))
    names: dict[tuple[str, ...], str] = {}
    for operand in operands:
        columns = list(zip(*(name.split(".") for name in operand.names), strict=False))[shared:-1]
        place = [column[0] for column in columns if len(set(column)) == 1]
        last = operand.names[0].rpartition(".")[2]
        names[operand.names] = next(n for n in _numbered(place, last) if n not in names.values())
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


def tensor_of(owner: nn.Module, name: str) -> torch.Tensor:
    """Return the tensor that a dotted name means."""
    path, _, last = name.rpartition(".")
    value = own_tensor(_module(owner, path), last)
    if value is None:
        raise LookupError(f"'{name}' is not a tensor")
    return value
