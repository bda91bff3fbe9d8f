"""Whether the operator computes what attention written out does, and faster: each kind is compared and timed once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...passes.kinds import Judgement, beyond_rounding, figures_of
from ...passes.sites import Cause, Reason
from ...passes.verification import MEANING, Float64Mode, Tolerance, distance, double_defaults, scale_of
from ...tracing.program import Program
from ..swap_kernels import Occurrence
from .excerpt import Compute, Excerpt, excerpt_of

__all__ = ["Judge"]

_SOME = 2
"""So many rows and heads are compared, and of long sequences one: each is by itself."""

_LONG = 1 << 20
"""So many scores of one head are many."""


@dataclass
class Judge:
    """Judge attention of one program, each kind of equal operands and operations once."""

    program: Program
    _known: dict[str, Judgement | None] = field(default_factory=dict[str, "Judgement | None"], init=False)

    def of(self, found: Occurrence) -> tuple[str, Judgement] | None:
        """Return the kind of an occurrence, and what is known of it; None where only its place can tell."""
        if self.program.training or self.program.replaying:
            return None
        if any(node.meta["val"].device.type != "cpu" for node in found.found.nodes.values()):
            return None
        # Where finite numbers hide scores, only the mask tells whether a query may attend to nothing.
        if found.found.values.get("number") != -math.inf and not {"hidden", "shown"}.isdisjoint(found.found.nodes):
            return None
        excerpt = excerpt_of(found)
        if excerpt is None:
            return None
        if excerpt.code not in self._known:
            try:
                self._known[excerpt.code] = self._judged(excerpt)
            except Exception:  # whatever drawn operands raise: in its place it is given others
                self._known[excerpt.code] = None
        known = self._known[excerpt.code]
        return None if known is None else (excerpt.code, known)

    def _judged(self, excerpt: Excerpt) -> Judgement:
        """Time a kind, and compare it where it gains."""
        given, measuring, figures = excerpt.given(), self.program.measuring, dict[str, Any]()
        if measuring:
            before, after = (partial(way, *given) for way in excerpt.beyond)
            figures = figures_of([before], [after], cold=measuring.is_cold)
            timed = Judgement(figures=figures)
            if timed.reason_against(surely=True) is not None:
                return timed
        scores = math.prod(given[excerpt.operands.index(name)].shape[-2] for name in ("q", "v"))
        count = _SOME if scores < _LONG else 1
        some = [each[tuple(slice(count) for _ in each.shape[:-2])] for each in given]
        difference = _difference(excerpt, some)
        return Judgement(figures=figures, reason=Reason.of(Cause.JUDGED_WRONG, difference) if difference else None)


# -- results -------------------------------------------------------------------------------------------------------


def _difference(excerpt: Excerpt, given: Sequence[Tensor]) -> str:
    """Return how far off the operator is, in results and gradients, or "" where that is rounding."""
    layers = tuple(number for number, name in enumerate(excerpt.operands) if name in ("q", "k", "keys", "v"))
    floats = tuple(number for number, each in enumerate(given) if each.is_floating_point())
    wide = [each.double() if each.is_floating_point() else each for each in given]
    for trained in dict.fromkeys([(), layers, floats]):  # torch's kernel depends on them
        with Float64Mode(), double_defaults():
            meant, computed = (_results(way, wide, trained) for way in excerpt.ways)
        own, found = (_results(way, given, trained) for way in excerpt.ways)
        keys = given[excerpt.operands.index("v")].shape[-2]
        for results in zip(meant, computed, own, found, strict=True):
            if reason := _reason_against(*results, keys):
                return reason
    return _lost_nan(excerpt, given)


def _results(way: Compute, given: Sequence[Tensor], trained: Sequence[int]) -> list[Tensor]:
    """Return what attention gives, and its gradients for some operands."""
    leaves = [each.detach().requires_grad_(number in trained) for number, each in enumerate(given)]
    with torch.set_grad_enabled(bool(trained)):
        result = way(*leaves)
    if not trained:
        return [result]
    upstream = torch.randn(result.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    wanted = [leaves[number] for number in trained]
    return [result.detach(), *torch.autograd.grad(result, wanted, upstream.to(result.dtype))]


def _reason_against(meant: Tensor, computed: Tensor, own: Tensor, found: Tensor, keys: int) -> str:
    if found.shape != own.shape or found.dtype != own.dtype:
        return f"the operator gives {tuple(found.shape)} of {found.dtype}, and not {tuple(own.shape)} of {own.dtype}"
    scale = scale_of(meant)
    seen = distance(meant, computed, Tolerance(0.0, MEANING * scale))
    if seen.reason:
        return f"the operator is off by {seen.error:.1e} of the scale in float64"
    errors = beyond_rounding(own, found, meant, keys)
    return "" if errors is None else f"the operator is off by {errors[0]:.1e} of the scale"


def _lost_nan(excerpt: Excerpt, given: Sequence[Tensor]) -> str:
    """Say whether the operator hides NaN in a query, which is to be seen in its result."""
    number = excerpt.operands.index("q")
    query = given[number].clone()
    query[..., 0, 0] = torch.nan
    changed = [query if place == number else each for place, each in enumerate(given)]
    with torch.no_grad():
        before, after = (way(*changed).isnan() for way in excerpt.ways)
    return "" if torch.equal(before, after) else "the operator hides NaN in a query"
