"""The lowerings there are, a row each: a name, a row and, if it writes what no other does, a file beside this one."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ....errors import MatchFailure
from ....layers import ensemble as batched
from ..search import Ensemble
from .packwise import Packwise, Perceptrons, has_perceptrons, vmapped
from .rebuilding import Unit
from .units import Task

__all__ = ["Lowering", "LoweringRule", "lowerings_for", "rule_called"]


class Lowering(enum.Enum):
    """How the fused computation is written: the fastest, as one row of the table says, or not at all."""

    AUTO = "auto"
    WIDE = "wide"
    WIDE_INPUT_FIRST = "wide_input_first"
    BMM = "bmm"
    GROUPED_CONV = "grouped_conv"
    VMAP = "vmap"
    MLP = "mlp"
    LOOP = "loop"


@dataclass(frozen=True)
class LoweringRule:
    """One lowering."""

    write: Callable[[Task], Sequence[Unit]]  # returns the units of graph that compute the packs of an ensemble
    suits: Callable[[Ensemble], bool] | None = None  # says whether other rows compute it otherwise
    input_first: bool = False  # weights [N, out, in] of one input lie in memory as [in, N, out]
    in_autocast: bool = True  # whether it may stand where a region autocasts
    for_kernels: bool = False  # whether it can be the fastest only where kernels of fxopt's own compute


_WIDE = Packwise(batched.wide_linear, batched.batched_linear)

LOWERINGS: Mapping[Lowering, LoweringRule] = MappingProxyType(
    {
        Lowering.WIDE: LoweringRule(_WIDE, lambda ensemble: ensemble.shares_input),
        Lowering.BMM: LoweringRule(
            Packwise(batched.shared_batched_linear, batched.batched_linear),
            lambda ensemble: any(pack.operator == "linear" for pack in ensemble.packs),
        ),
        Lowering.WIDE_INPUT_FIRST: LoweringRule(_WIDE, lambda ensemble: ensemble.shares_input, input_first=True),
        Lowering.GROUPED_CONV: LoweringRule(Packwise(batched.shared_grouped_linear, batched.grouped_linear)),
        # Inside of vmap nothing is autocast.
        Lowering.VMAP: LoweringRule(vmapped, in_autocast=False),
        Lowering.MLP: LoweringRule(Perceptrons(_WIDE), has_perceptrons, for_kernels=True),
    }
)
"""In order of preference: the first is taken where nothing is measured, and of those that are equally fast."""


def lowerings_for(ensemble: Ensemble, *, autocast: bool, kernels: bool = False) -> tuple[str, ...]:
    """Return the names of the lowerings to try for an ensemble, in order of preference."""

    def fits(rule: LoweringRule) -> bool:
        return (
            (rule.in_autocast or not autocast)
            and (kernels or not rule.for_kernels)
            and (rule.suits is None or rule.suits(ensemble))
        )

    return tuple(name.value for name, rule in LOWERINGS.items() if fits(rule))


def rule_called(name: str) -> LoweringRule:
    """Return the lowering of a name; one in a plan of another version may not be there."""
    rules = {lowering.value: rule for lowering, rule in LOWERINGS.items()}
    if name not in rules:
        raise MatchFailure(f"there is no lowering '{name}'; there are {', '.join(rules)}")
    return rules[name]
