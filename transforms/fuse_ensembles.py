"""Fuse isomorphic, independent members into batched operations on stacked parameters."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import fx, nn

from ..compat import own_children, own_tensor
from ..errors import Unsuitable
from ..layers.lowering import Lowering as Lowered
from ..layers.lowering import covered_operations, lower
from ..layers.members import FusedMembers, attach_member
from ..passes.base import Goal, Numerics, Pass, Phase, Refusal, Site
from ..passes.expand import expand
from ..passes.expansion import Expansion, Operation, is_chain
from ..passes.facts import TensorOwners
from ..passes.forms import may_share_memory
from ..passes.gradient_reach import reached_outputs, used_by
from ..passes.isomorphism import find_ensembles
from ..passes.mode_guards import Case
from ..passes.packs import Ensemble, Parameters, Shared, submodule
from ..passes.places import Place, places_of, present_cases, rewritten_variants
from ..passes.rebuild import rebuild
from ..passes.state_map import Stack
from ..tracing.captured import capture_of
from ..tracing.regions import Region

if TYPE_CHECKING:
    from ..passes.edit import Edit
    from ..tracing.program import Program

__all__ = ["FuseEnsembles", "Lowering"]

LARGEST_UNMEASURED_WEIGHT = 16384
"""Elements of one member's weight up to which fusing is the rule where nothing can be measured.

From 128 heads of 16-32-4 (512 elements), which win at every batch size on a CPU, and 8 members of 256-512-64 (131,072),
which lose: benchmarks/ensembles.py draws the line between them.
"""


MEASURED_OPERATORS = ("conv", "recurrent", "scaled_dot_product_attention", "module")
"""Operators whose work is not told by their weights: with images or sequences of some size the loop wins on a CPU."""

_INTERNAL = frozenset(vars(nn.Module()))

SWITCHABLE = ("wide", "bmm", "wide_input_first", "grouped_conv")
"""The lowerings that differ in how linear layers are written, so that one graph may hold two of them."""


class Lowering(enum.Enum):
    """How the fused computation is written."""

    AUTO = "auto"
    WIDE = "wide"
    WIDE_INPUT_FIRST = "wide_input_first"
    BMM = "bmm"
    GROUPED_CONV = "grouped_conv"
    VMAP = "vmap"
    LOOP = "loop"


@dataclass(frozen=True)
class FuseEnsembles(Pass):
    """Compute the members of an ensemble together, on stacked parameters.

    Before: torch.cat([head(x) for head in self.heads], -1)
    After:  concatenate_members(batched_linear(tanh(wide_linear(x, weight_0, bias_0)), weight_2, bias_2), -1)
    Refuses: members with hooks or parametrizations, tied or shared parameters; in training, members that differ in
        requires_grad or that do not always receive gradients together.

    Options:
        lowering: `auto` takes the fastest measured (without example inputs: `wide` where the members share their input,
            else `bmm`, and nothing where one weight has over 16,384 elements or members have convolutions, attention or
            recurrent layers); any other name is taken as asked.
    """

    lowering: Lowering = Lowering.AUTO

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    goal: ClassVar[Goal] = Goal.SPEED
    phase: ClassVar[Phase] = Phase.BOTH

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        if self.lowering is Lowering.LOOP:
            return
        for home, capture in list(program.captures.items()):
            if all(is_chain(variant.graph) for variant in capture.variants):
                continue
            closed: dict[str, str] = {}
            seen: set[frozenset[Parameters]] = set()
            for case in present_cases(program, home):
                for path, reason in _closed_families(expand(program, home, case.variant)).items():
                    if path not in closed:
                        closed[path] = reason
                        yield Refusal(reason, _qualified(home, path))
                # Beside a large ensemble that is not fused yet, the gain of a small one is lost in the noise.
                for ensemble in sorted(find_ensembles(program, home, case.variant), key=_extent, reverse=True):
                    positions = frozenset(ensemble.parameters)
                    names = (name for operand in positions for name in operand.names)
                    if positions not in seen and not any(n.startswith(f"{path}.") for path in closed for n in names):
                        yield self._examine(ensemble, case, program, home)
                    seen.add(positions)

    def _examine(self, ensemble: Ensemble, case: Case, program: Program, home: str) -> Site | Refusal:
        at = _qualified(home, _common_name(ensemble))
        try:
            places = places_of(ensemble, case, program, home)
        except Unsuitable as unlike:
            return Refusal(str(unlike), at)
        reason = next((o for place in places if (o := _obstacle(place, program, home)) is not None), None)
        if reason is not None:
            return Refusal(reason, at)
        phase, training_reason = _phase(places, program, home)
        if training_reason is not None and program.training:
            return Refusal(training_reason, at)
        unmeasured = self.lowering is Lowering.AUTO and not program.inputs
        doubt = _doubt(ensemble, program, home) if unmeasured else None
        if doubt is not None:
            return Refusal(f"{doubt}, so fusing them may be slower; give example_inputs to measure it", at)
        count = sum(1 for _ in ensemble.parameters)
        members = ((f"{p}.{m}", op.name) for p, pack in enumerate(ensemble.packs) for m, op in enumerate(pack.members))
        return Site(
            program, home, dict(members), case.variant,
            choices=self._choices(ensemble), phase=phase, required=self.lowering is not Lowering.AUTO,
            detail=f"{ensemble.size} members, {count} parameters each", label=at,
            rows_of=places[0].first_input, switchable=SWITCHABLE,
        )  # fmt: skip

    def _choices(self, ensemble: Ensemble) -> tuple[str, ...]:
        if self.lowering is not Lowering.AUTO:
            return (self.lowering.value,)
        if not any(pack.operator == "linear" for pack in ensemble.packs):
            return ("grouped_conv", "vmap")
        if not ensemble.shares_input:
            return ("bmm", "vmap", "grouped_conv")
        return ("wide", "bmm", "wide_input_first", "vmap", "grouped_conv")

    def rewrite(self, site: Site, edit: Edit) -> None:
        ensemble = _located(site)
        case = next(case for case in present_cases(site.program, site.home) if case.variant == site.variant)
        places = places_of(ensemble, case, site.program, site.home)
        stored = _store_names(ensemble)
        input_first = _weights_of_shared_input(ensemble) if "wide_input_first" in _choice(site) else ()
        store, names = _stack_parameters(ensemble, stored, input_first, edit)
        graphs = [_lowered(place, site, names, edit) for place in places]
        edit.set_variants(*rewritten_variants(places, graphs, site.program.captures[site.home].variants))
        _close(_views(stored, store), [path for place in places for path in place.opened(edit.home)], edit)


def _choice(site: Site) -> str:
    return site.choice or site.choices[0]


def _lowered(place: Place, site: Site, names: Mapping[tuple[str, ...], str], edit: Edit) -> fx.Graph:
    """Return a graph of the home with the ensemble in it written as batched operations."""
    graph = site.program.graph(site.home, place.case.variant)
    name = f"vectorized_{_common_name(place.ensemble)}".replace(".", "_")
    lowering = Lowered(
        place.ensemble, _choice(site), names,
        lambda module: edit.add_module(module, name=name),
        place.expansion.may_restart,
        next((o for o in place.expansion.operations if o.kind == "placeholder" and o.name == site.rows_of), None),
    )  # fmt: skip
    return rebuild(graph, place.expansion, lower(lowering), covered_operations(lowering))


# -- what may be fused ---------------------------------------------------------------------------------------------


def _closed_families(expansion: Expansion) -> dict[str, str]:
    """Return container -> why the calls of its children cannot be fused, where one of several cannot be opened."""
    families: dict[str, list[Operation]] = {}
    for operation in expansion.operations:
        if operation.name in expansion.closed or operation.name in expansion.conditional:
            families.setdefault(str(operation.target).rpartition(".")[0], []).append(operation)
    closed: dict[str, str] = {}
    for path, calls in families.items():
        first = next((call for call in calls if call.name in expansion.closed), None)
        independent = len({call.level for call in calls}) < len(calls)
        call = first or (calls[0] if independent else None)
        if path and call is not None:
            reason = expansion.closed.get(call.name) or expansion.conditional[call.name]
            closed[path] = f"member {str(call.target).rpartition('.')[2]} cannot be fused: {reason}"
    return closed


def _obstacle(place: Place, program: Program, home: str) -> str | None:
    if isinstance(program.module(home), Region):
        return "they are called in a region, which does not own them"
    owners = program.facts[TensorOwners]
    for operand in place.ensemble.parameters:
        if len(set(operand.names)) < len(operand.names):
            repeated = next(name for name in operand.names if operand.names.count(name) > 1)
            return f"members share the parameter '{repeated}'"
        for name in operand.names:
            names = owners.names(_qualified(home, name))
            if len(names) > 1:
                return f"the parameter '{names[0]}' is tied to '{names[1]}'"
    return _order_obstacle(place)


def _order_obstacle(place: Place) -> str | None:
    ensemble, expansion, inside = place.ensemble, place.expansion, place.covered
    writing = [operation for operation in expansion.operations if operation.mutates and operation not in inside]
    for pack in ensemble.packs:
        first, last = min(m.index for m in pack.members), max(m.index for m in pack.members)
        if any(first < write.index < last for write in writing):
            return "a tensor is written in place between the members"
    members = {member for pack in ensemble.packs for member in pack.members}
    if any(may_share_memory(target, members) for write in writing for target in itertools.islice(write.inputs, 1)):
        return "a member's result is written in place"
    return None


def _phase(places: Sequence[Place], program: Program, home: str) -> tuple[Phase | None, str | None]:
    """Return the phase that the rewrite is limited to, and why training is not covered."""
    module, ensemble = program.module(home), places[0].ensemble
    for operand in ensemble.parameters:
        trainable = [_parameter(module, name).requires_grad for name in operand.names]
        if len(set(trainable)) > 1:
            odd = operand.names[trainable.index(not trainable[0])]
            return Phase.EVAL, f"members differ in requires_grad: '{operand.names[0]}' and '{odd}'"
    if not any(_parameter(module, name).requires_grad for operand in ensemble.parameters for name in operand.names):
        return None, None
    members = [[operand.names[i] for operand in ensemble.parameters] for i in range(ensemble.size)]
    other = used_by(program, home, [name for names in members for name in names])
    if other is not None:
        return Phase.EVAL, f"{other} uses members too, so a loss may give gradients to some of them only"
    trained = [place.expansion for place in places if place.is_for(training=True, now=module.training)]
    if any(len(set(reached_outputs(expansion, members))) > 1 for expansion in trained):
        return Phase.EVAL, "members reach different outputs, so a loss may give gradients to some of them only"
    return None, None


def _extent(ensemble: Ensemble) -> int:
    return sum(pack.size for pack in ensemble.packs)


def _doubt(ensemble: Ensemble, program: Program, home: str) -> str | None:
    """Return why it is not known without measuring whether an ensemble pays, or None where the rule is that it does."""
    module = program.module(home)
    if max(_parameter(module, operand.names[0]).numel() for operand in ensemble.parameters) > LARGEST_UNMEASURED_WEIGHT:
        return "the members are large"
    if any(pack.operator.startswith(MEASURED_OPERATORS) for pack in ensemble.packs):
        return "how much the members' convolutions, attention or recurrent layers compute is not known"
    return None


# -- rewriting -----------------------------------------------------------------------------------------------------


def _located(site: Site) -> Ensemble:
    """Find the site's ensemble again in the graph as it is now: calls may have been written out since."""
    wanted = {_written_out(name) for name in site.nodes.values()}
    for ensemble in find_ensembles(site.program, site.home, site.variant):
        if {_written_out(member.name) for pack in ensemble.packs for member in pack.members} == wanted:
            return ensemble
    raise Unsuitable("an earlier rewrite took some of its members")


def _written_out(name: str) -> str:
    """Return the name that an operation inside an opened call gets as a node of the home."""
    return name.replace("/", "_")


def _stack_parameters(
    ensemble: Ensemble, places: dict[tuple[str, ...], str], input_first: Iterable[tuple[str, ...]], edit: Edit
) -> tuple[FusedMembers, dict[tuple[str, ...], str]]:
    """Stack the members' tensors in one new child, some with their inputs first. Return it and the new names."""
    home = edit.home
    members = {places[o.names]: [_parameter(home, name) for name in o.names] for o in ensemble.parameters}
    stacked = {place: torch.stack([parameter.detach() for parameter in group]) for place, group in members.items()}
    stacked.update({places[names]: _input_first(stacked[places[names]]) for names in input_first})
    parameters = {place: tensor for place, tensor in stacked.items() if isinstance(members[place][0], nn.Parameter)}
    buffers = {place: tensor for place, tensor in stacked.items() if place not in parameters}
    store = FusedMembers(parameters, {place: members[place][0].requires_grad for place in parameters}, buffers)
    child = edit.add_module(store, name=f"fused_{_common_name(ensemble)}".replace(".", "_"))
    for operand in ensemble.parameters:
        edit.record_state(Stack(operand.names, f"{child}.{places[operand.names]}"))
    return store, {names: f"{child}.{place}" for names, place in places.items()}


def _weights_of_shared_input(ensemble: Ensemble) -> list[tuple[str, ...]]:
    """Return the weights of the linears that all read one input."""
    linears = (pack.operands for pack in ensemble.packs if pack.operator == "linear")
    return [o[1].names for o in linears if isinstance(o[0], Shared) and isinstance(o[1], Parameters)]


def _input_first(weight: torch.Tensor) -> torch.Tensor:
    """Return a stacked weight [N, out, in] whose memory is that of a contiguous [in, N, out]."""
    return weight.permute(2, 0, 1).contiguous().permute(1, 2, 0)


_Views = dict[str, dict[str, tuple[FusedMembers, str, int]]]


def _views(places: dict[tuple[str, ...], str], store: FusedMembers) -> _Views:
    """Return path of a member's module -> name of its tensor -> the slice that takes its place."""
    views: _Views = {}
    for names, place in places.items():
        for index, name in enumerate(names):
            path, _, last = name.rpartition(".")
            views.setdefault(path, {})[last] = (store, place, index)
    return views


def _close(views: _Views, opened: Iterable[str], edit: Edit) -> None:
    """Leave views of what was stacked, and refuse changes to members and opened modules that would have no effect."""
    seals, opened = _parents(views), dict.fromkeys(opened)
    for path in dict.fromkeys((*views, *seals, *opened)):
        module, sealed = _module(edit.home, path), seals.get(path, set[str]())
        if path in opened:
            sealed.update(_settings(module), ("forward",))
        edit.on_undo(attach_member(module, views.get(path, {}), sealed))


def _module(home: nn.Module, path: str) -> nn.Module:
    module = submodule(home, path)
    if module is None:
        raise LookupError(f"there is no module '{path}'")
    return module


def _settings(module: nn.Module) -> set[str]:
    """Return the attributes of a module that its graph was read from: its children, and settings such as a slope."""
    capture = capture_of(module)
    if capture is not None:
        return {*own_children(module), *capture.reads}
    return {name for name in vars(module).keys() - _INTERNAL if not name.startswith("_")}


def _parents(paths: Iterable[str]) -> dict[str, set[str]]:
    """Return parent path -> names of the children on the way to a member."""
    parents: dict[str, set[str]] = {}
    for path in paths:
        while path:
            parent, _, last = path.rpartition(".")
            parents.setdefault(parent, set()).add(last)
            path = parent
    return parents


def _store_names(ensemble: Ensemble) -> dict[tuple[str, ...], str]:
    """Name each stacked parameter after its place within a member: `heads.*.0.weight` becomes `weight_0`."""
    operands = list(ensemble.parameters)
    shared = len(_common_prefix([name.split(".") for operand in operands for name in operand.names]))
    names: dict[tuple[str, ...], str] = {}
    for operand in operands:
        columns = list(zip(*(name.split(".") for name in operand.names), strict=False))[shared:-1]
        place = [column[0] for column in columns if len(set(column)) == 1]
        name = "_".join([operand.names[0].rpartition(".")[2], *place])
        taken = set(names.values())
        names[operand.names] = next(n for n in _numbered(name) if n not in taken)
    return names


def _numbered(name: str) -> Iterator[str]:
    yield name
    for number in itertools.count(1):
        yield f"{name}_{number}"


def _common_name(ensemble: Ensemble) -> str:
    """Return the container that the members have in common, or `members`."""
    prefix = _common_prefix([name.split(".")[:-1] for operand in ensemble.parameters for name in operand.names])
    return ".".join(prefix) or "members"


def _common_prefix(paths: Iterable[Sequence[str]]) -> tuple[str, ...]:
    ordered = sorted(tuple(path) for path in paths)
    first, last = ordered[0], ordered[-1]
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]


def _parameter(home: nn.Module, name: str) -> torch.Tensor:
    path, _, last = name.rpartition(".")
    value = own_tensor(_module(home, path), last)
    if value is None:
        raise LookupError(f"'{name}' is not a tensor")
    return value


def _qualified(home: str, name: str) -> str:
    return f"{home}.{name}" if home and name else home or name
