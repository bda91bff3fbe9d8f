"""Fuse isomorphic, independent members into batched operations on stacked parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ...errors import MatchFailure, positive_integer
from ...passes.contract import Pass
from ...passes.rewriting import Edit, reason_against_stacking, tensor_of
from ...passes.sites import Goal, Numerics, Phase, Refusal, Site
from ...runtime.graphs import Region
from ...runtime.state import Holder, holder_of
from ...runtime.values import qualified
from ...tracing.program import Program, is_on_meta
from .inlining import InlinedGraph, Operation, inlined_graph, is_chain
from .lowerings import Lowering, lowerings_for
from .search import (
    Case,
    Ensemble,
    Flags,
    GradientReach,
    Parameters,
    Place,
    attribute,
    find_ensembles,
    may_share_memory,
    places_of,
    present_cases,
    used_by,
)
from .stacking import common_name, fuse

__all__ = ["FuseEnsembles", "Lowering"]

LARGEST_UNMEASURED_WEIGHT = 16384
"""Elements of one member's weight up to which fusing is the rule where nothing can be measured.

From 128 heads of 16-32-4 (512 elements), which win at every batch size on a CPU, and 8 members of 256-512-64 (131,072),
which lose: benchmarks/ensembles.py draws the line between them.
"""


MEASURED_OPERATORS = ("conv", "recurrent", "scaled_dot_product_attention", "module")
"""Operators whose work is not told by their weights: with images or sequences of some size the loop wins on a CPU."""


@dataclass(frozen=True)
class FuseEnsembles(Pass):
    """Compute the members of an ensemble together, on stacked parameters.

    Before: torch.cat([head(x) for head in self.heads], -1)
    After:  concatenate_members(batched_linear(tanh(wide_linear(x, weight_0, bias_0)), weight_2, bias_2), -1)
    Refuses: members with hooks or parametrizations, tied or shared parameters, members that differ in requires_grad or
        mode; in training, members that do not always receive gradients together.

    Options:
        lowering: `auto` takes the fastest measured (without example inputs: `wide` where the members share their input,
            else `bmm`, and nothing where one weight has over 16,384 elements or members have convolutions, attention or
            recurrent layers); any other name is taken as asked.
        members: ensembles of fewer members are left as they are.
    """

    lowering: Lowering = Lowering.AUTO
    members: int = 2

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    goal: ClassVar[Goal] = Goal.SPEED
    phase: ClassVar[Phase] = Phase.BOTH

    def check(self, model: nn.Module) -> None:
        positive_integer(self.members, "fuse_ensembles: members")

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        if self.lowering is Lowering.LOOP:
            return
        for owner, capture in list(program.captures.items()):
            if all(is_chain(specialization.graph) for specialization in capture.specializations):
                continue
            closed: dict[str, str] = {}
            seen: set[frozenset[Parameters]] = set()
            for case in present_cases(program, owner):
                inlined = inlined_graph(program, owner, case.specialization)
                for path, reason in _closed_families(inlined).items():
                    if path not in closed:
                        closed[path] = reason
                        yield Refusal(reason, qualified(owner, path))
                if _most_alike(inlined) < self.members:
                    continue
                # Beside a large ensemble that is not fused yet, the gain of a small one is lost in the noise.
                found = find_ensembles(program, owner, case.specialization)
                for ensemble in sorted(found, key=lambda each: -sum(pack.size for pack in each.packs)):
                    positions = frozenset(ensemble.parameters)
                    names = (name for operand in positions for name in operand.names)
                    is_small = ensemble.size < self.members
                    if (
                        positions not in seen
                        and not is_small
                        and not any(n.startswith(f"{path}.") for path in closed for n in names)
                    ):
                        yield self._examine(ensemble, case, program, owner)
                    seen.add(positions)

    def _examine(self, ensemble: Ensemble, case: Case, program: Program, owner: str) -> Site | Refusal:
        holder = holder_of(program.model, owner)
        at = qualified(owner, _named(ensemble))
        try:
            places = places_of(ensemble, case, program, owner)
        except MatchFailure as unlike:
            return Refusal(str(unlike), at)
        reason = next(
            (o for place in places if (o := _reason_against(place, program, owner, holder)) is not None), None
        )
        if reason is not None:
            return Refusal(reason, at)
        phase, training_reason = _phase(places, program, owner)
        if training_reason is not None and program.training:
            return Refusal(training_reason, at)
        unmeasured = self.lowering is Lowering.AUTO and not program.inputs and not program.replaying
        slow = _reason_to_measure(ensemble, program, owner) if unmeasured else None
        if slow is not None:
            return Refusal(f"{slow}, so fusing them may be slower; give example_inputs to measure it", at)
        count, module = len(list(ensemble.parameters)), program.module(owner)
        members = ((f"{p}.{m}", op.name) for p, pack in enumerate(ensemble.packs) for m, op in enumerate(pack.members))
        return Site(
            program, owner, dict(members), case.specialization,
            choices=self._choices(ensemble, module, holder),
            phase=phase, required=self.lowering is not Lowering.AUTO,
            detail=f"{ensemble.size} members, {count} parameters each", label=at,
            kind=_kind(ensemble, module),
        )  # fmt: skip

    def _choices(self, ensemble: Ensemble, owner: nn.Module, holder: Holder) -> tuple[str, ...]:
        if self.lowering is not Lowering.AUTO:
            return (self.lowering.value,)
        device = next(tensor_of(owner, operand.names[0]).device for operand in ensemble.parameters)
        return lowerings_for(ensemble, autocast=_casts(holder), kernels=_kernels_compute_on(device))

    def rewrite(self, site: Site, edit: Edit) -> None:
        fuse((site,), edit)

    def rewrite_group(self, sites: Sequence[Site], edit: Edit) -> None:
        fuse(sites, edit)


def _kernels_compute_on(device: torch.device) -> bool:
    if device.type == "cpu":  # most are, and fxopt's operators take time to import
        return False
    from ...cuda_ops import kernels_compute_on

    return kernels_compute_on(device)


def _most_alike(inlined: InlinedGraph) -> int:
    """Return how many operations of one kind there are: no ensemble has more members."""
    computed = (each.operator for each in inlined.operations if each.kind not in ("placeholder", "get_attr", "output"))
    return max(Counter(computed).values(), default=0)


def _named(ensemble: Ensemble) -> str:
    """Return what people call an ensemble: the container of its members or, without one, the modules that they use."""
    modules = dict.fromkeys(n.rpartition(".")[0] for each in ensemble.parameters for n in each.names)
    if len({name.split(".")[0] for name in modules}) == 1 or "" in modules:
        return common_name(ensemble)
    shown = list(modules)
    return ", ".join(shown) if len(shown) <= 4 else f"{shown[0]} ... {shown[-1]}"  # an attention has four projections


# -- what may be fused ---------------------------------------------------------------------------------------------


def _closed_families(inlined: InlinedGraph) -> dict[str, str]:
    """Return container -> why the calls of its children cannot be fused, where one of several cannot be inlined."""
    families: dict[str, list[Operation]] = {}
    for operation in inlined.operations:
        if operation.name in inlined.closed or operation.name in inlined.conditional:
            families.setdefault(str(operation.target).rpartition(".")[0], []).append(operation)
    closed: dict[str, str] = {}
    for path, calls in families.items():
        first = next((call for call in calls if call.name in inlined.closed), None)
        independent = len({call.level for call in calls}) < len(calls)
        call = first or (calls[0] if independent else None)
        if path and call is not None:
            reason = inlined.closed.get(call.name) or inlined.conditional[call.name]
            closed[path] = f"member {str(call.target).rpartition('.')[2]} cannot be fused: {reason}"
    return closed


def _reason_against(place: Place, program: Program, owner: str, holder: Holder) -> str | None:
    borrowed = _reason_in_region(place, program, owner, holder)
    if borrowed is not None:
        return borrowed
    module, seen = program.module(owner), set[str]()
    for operand in place.ensemble.parameters:
        if len(set(operand.names)) < len(operand.names):
            repeated = next(name for name in operand.names if operand.names.count(name) > 1)
            return f"members share the parameter '{repeated}'"
        reason = reason_against_stacking(operand.names, program, module, holder.qualified)
        if reason is not None:
            return reason
        again = next((name for name in operand.names if name in seen), None)
        if again is not None:
            return f"the parameter '{again}' is read in two places of the ensemble"
        seen.update(operand.names)
    return _difference(place.ensemble, module) or _reason_in_order(place)


def _difference(ensemble: Ensemble, owner: nn.Module) -> str | None:
    """Return what members are set up differently in, though they compute alike."""
    for operand in ensemble.parameters:
        odd = _odd_one(operand.names, [tensor_of(owner, name).requires_grad for name in operand.names])
        if odd is not None:  # in evaluation, too: gradients may be asked for there
            return f"members differ in requires_grad: '{operand.names[0]}' and '{odd}'"
    for operand in (operand for pack in ensemble.packs for operand in pack.operands):
        if isinstance(operand, Flags):
            odd = _odd_one(operand.names, [attribute(owner, name) for name in operand.names])
            if odd is not None:
                return f"members are in different modes: '{operand.names[0]}' and '{odd}' differ"
    return None


def _odd_one(names: Sequence[str], values: Sequence[object]) -> str | None:
    """Return the first name whose value is not that of the first one."""
    return next((name for name, value in zip(names, values, strict=True) if value != values[0]), None)


def _reason_in_region(place: Place, program: Program, owner: str, holder: Holder) -> str | None:
    if isinstance(holder.module, Region):
        return "they are called in a region that does not own them"
    if not holder.regions:
        return None
    other = used_by(program, owner, [name for operand in place.ensemble.parameters for name in operand.names])
    if other is not None:
        return f"they are called under {holder.regions[0].context}, and {other} uses members too"
    if _casts(holder, around=1):
        return f"they are called under {holder.regions[0].context} within autocast, where they cannot be checked alone"
    incomparable = not program.inputs or is_on_meta(program.module(owner))
    if _casts(holder) and incomparable and not program.replaying:
        return "they are called under autocast; give example_inputs to compare the types that it casts to"
    return None


def _casts(holder: Holder, around: int = 0) -> bool:
    """Say whether a region autocasts, or one that is `around` as many."""
    return any(region.context.kind == "autocast" for region in holder.regions[around:])


def _reason_in_order(place: Place) -> str | None:
    ensemble, inlined, inside = place.ensemble, place.inlined, place.ensemble.covered
    writing = [operation for operation in inlined.writes if operation not in inside]
    for pack in ensemble.packs:
        first, last = min(m.index for m in pack.members), max(m.index for m in pack.members)
        if any(first < write.index < last for write in writing):
            return "a tensor is written in place between the members"
    members = {member for pack in ensemble.packs for member in pack.members}
    if any(may_share_memory(target, members) for write in writing for target in write.inputs[:1]):
        return "a member's result is written in place"
    return None


def _phase(places: Sequence[Place], program: Program, owner: str) -> tuple[Phase | None, str | None]:
    """Return the phase that the rewrite is limited to, and why training is not covered."""
    module, parameters = program.module(owner), list(places[0].ensemble.parameters)
    if not any(tensor_of(module, operand.names[0]).requires_grad for operand in parameters):
        return None, None
    members = list(zip(*(operand.names for operand in parameters), strict=True))
    other = used_by(program, owner, [name for names in members for name in names])
    if other is not None:
        return Phase.EVAL, f"{other} uses members too, so a loss may give gradients to some of them only"
    trained = [place.inlined for place in places if place.is_for_training(now=module.training)]
    reach = program.analyses[GradientReach]
    if any(len(set(reach.reached(inlined, members))) > 1 for inlined in trained):
        return Phase.EVAL, "members reach different outputs, so a loss may give gradients to some of them only"
    return None, None


def _kind(ensemble: Ensemble, owner: nn.Module) -> Hashable:
    """Return what is equal for ensembles of equal members that are equally many."""
    packs = tuple((pack.operator, pack.function, repr(pack.arguments)) for pack in ensemble.packs)
    tensors = tuple(tensor_of(owner, operand.names[0]).shape for operand in ensemble.parameters)
    return ensemble.size, packs, tensors, ensemble.shares_input


def _reason_to_measure(ensemble: Ensemble, program: Program, owner: str) -> str | None:
    """Return why it is not known without measuring whether an ensemble pays, or None where the rule is that it does."""
    module = program.module(owner)
    if max(tensor_of(module, operand.names[0]).numel() for operand in ensemble.parameters) > LARGEST_UNMEASURED_WEIGHT:
        return "the members are large"
    if any(pack.operator.startswith(MEASURED_OPERATORS) for pack in ensemble.packs):
        return "how much the members' convolutions, attention or recurrent layers compute is not known"
    return None
