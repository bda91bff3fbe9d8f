"""Compute the experts of a mixture together."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, cast

from torch import nn

from ...compat import has_hooks, modules_by_name
from ...errors import MatchFailure
from ...layers import moe
from ...layers.members import settings_of
from ...passes.contract import Pass
from ...passes.rewriting import Edit, reason_against_stacking
from ...passes.sites import Goal, Numerics, Phase, Refusal, Site
from ...runtime.graphs import specializations_of
from ...runtime.values import qualified, user_class
from ...tracing.program import Program
from .find import GROUPED, find_mixtures, mixture_at
from .grouped import grouped_experts, write_grouped
from .members import Items
from .mixtures import Mixture
from .write import write

__all__ = ["FuseExperts", "Lowering"]


class Lowering(enum.Enum):
    """How experts are applied to the tokens that chose them."""

    AUTO = "auto"  # the fastest of the others; rules decide where calls have under half or over twice as many tokens
    GROUPED = "grouped"  # tokens are sorted by expert, and all groups multiplied by `torch.nn.functional.grouped_mm`
    PADDED = "padded"  # each expert has a block of one length: one batched product
    GATHERED = "gathered"  # weights are copied for each token: for very few of them
    LOOP = "loop"  # one expert after another, on stacked parameters that are cut once


_LOWERINGS = [lowering.value for lowering in Lowering if lowering is not Lowering.AUTO]


@dataclass(frozen=True)
class FuseExperts(Pass):
    """Compute the experts of a mixture together, on stacked parameters.

    Before: for i, expert in enumerate(experts): rows, j = where(chosen == i); y[rows] += w[rows, j] * expert(x[rows])
    After:  y = mixture(x, chosen, w, stacked_experts.w1_weight, stacked_experts.w2_weight)
    Refuses: experts that compute different things or hold more than linear layers; with hooks, tied, shared or
        quantized weights; in training with dropout, or where the examples leave one of separate experts without tokens.

    Options:
        lowering: `auto` takes the fastest measured; any other name is taken as asked.
    """

    lowering: Lowering = Lowering.AUTO

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    goal: ClassVar[Goal] = Goal.SPEED
    phase: ClassVar[Phase] = Phase.BOTH

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for found in find_mixtures(program):
            owner, reason = (found.owner, _reason_against(found, program)) if isinstance(found, Mixture) else found
            if reason is GROUPED and self.lowering is not Lowering.AUTO:
                yield from self._grouped(program, owner)
                continue
            if reason is not None or not isinstance(found, Mixture):
                yield Refusal(reason or "", owner or "(root)")
                continue
            auto = self.lowering is Lowering.AUTO
            yield Site(
                program, owner, {}, choices=tuple(_LOWERINGS) if auto else (self.lowering.value,),
                phase=Phase.EVAL if found.template.idle else None, required=not auto, found=found,
                detail=f"{found.count} experts, {len(found.template.layers)} linear layers each",
            )  # fmt: skip

    def _grouped(self, program: Program, owner: str) -> Iterator[Site | Refusal]:
        """Yield the graphs of a module whose products are grouped already: what is named is taken instead."""
        module = program.module(owner)
        hooked = _hooked(module)
        if hooked is not None:
            yield Refusal(hooked, owner or "(root)")
            return
        for number, each in enumerate(specializations_of(module)):
            try:
                found = grouped_experts(module, each.graph)
            except MatchFailure as failure:
                yield Refusal(str(failure), owner or "(root)")
                continue
            yield Site(
                program, owner, {"result": found.result.name}, number, choices=(self.lowering.value,), required=True,
                detail=f"{found.count} experts, {len(found.template.layers)} linear layers each, grouped before",
            )  # fmt: skip

    def rewrite(self, site: Site, edit: Edit) -> None:
        if site.nodes:
            write_grouped(cast("moe.Lowering", site.choice or site.choices[0]), edit)
            return
        found = site.found if isinstance(site.found, Mixture) else mixture_at(site.program, site.owner)
        lowering = cast("moe.Lowering", site.choice or site.choices[0])
        write(found, lowering, edit, always=self.lowering is not Lowering.AUTO)


def _unlike(mixture: Mixture, module: nn.Module) -> str | None:
    """Return what keeps modules of experts from being computed as one of them is."""
    for family in dict.fromkeys((each.container, each.names) for each in mixture.separate):
        items = Items(*family)
        first, *others = (module.get_submodule(items.path(expert)) for expert in range(items.count))
        for number, other in enumerate(others, 1):
            if _settings(other) != _settings(first):
                return f"experts are set up differently: '{items.path(0)}' and '{items.path(number)}'"
    return None


def _hooked(module: nn.Module) -> str | None:
    """Say which module inside has hooks, since they would not be called."""
    hooked = next((path for path, inner in modules_by_name(module).items() if path and has_hooks(inner)), None)
    return None if hooked is None else f"'{hooked}' has hooks"


def _settings(expert: nn.Module) -> list[object]:
    """Return what a module and those inside it are, but for their tensors."""
    return [
        (path, user_class(type(inner)), [(name, getattr(inner, name)) for name in settings_of(inner)])
        for path, inner in modules_by_name(expert).items()
    ]


def _reason_against(mixture: Mixture, program: Program) -> str | None:
    module = program.module(mixture.owner)
    if mixture.template.idle and program.training:
        return "its experts draw random numbers in training (dropout)"
    odd = _hooked(module) or _unlike(mixture, module)
    if odd is not None:
        return odd
    idle = sorted(set(range(mixture.count)) - mixture.reached)
    if idle and program.training and mixture.separate:
        return (
            f"the examples leave expert {idle[0]} without tokens: it has no gradient; fused, it would have zeros, "
            "on which momentum and weight decay act; give example_inputs that reach every expert"
        )
    for names in (items.paths for items in mixture.separate):
        reason = reason_against_stacking(names, program, module, partial(qualified, mixture.owner))
        if reason is not None:
            return reason
        if len({module.get_parameter(name).requires_grad for name in names}) > 1:
            return f"experts differ in requires_grad: '{names[0]}' and others"
        if len({module.get_parameter(name).shape for name in names}) > 1:
            return f"experts differ in shape: '{names[0]}' and others"
    return None
