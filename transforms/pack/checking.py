"""Whether packed layers compute what layers do: one of each kind is compared with what it gives in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...layers.packed import Packed
from ...passes.kinds import allowed_error, error_of
from ...passes.sites import Cause, Reason
from ...passes.verification import Tolerance, distance, scale_of
from .timing import PACKED

__all__ = ["Check", "off_by"]

_OUTPUTS = 16
"""So many outputs are computed in float64; the others are compared with the layer's own in float32."""
_TINY = torch.finfo(torch.float64).tiny


def off_by(error: float, own_error: float) -> Reason:
    """Return the reason against a packed layer that is off by an error, relative to the scale, and the layer's own."""
    return Reason.of(Cause.JUDGED_WRONG, lowering=PACKED, error=error, own_error=own_error)


@dataclass(frozen=True)
class Check:
    """A layer and the same on a packed weight; `along` are the dimensions of outputs in weight and result."""

    packed: Packed
    weight: Tensor
    bias: Tensor | None
    adds: bool
    along: tuple[int, int] | None
    rows: slice
    terms: int

    def reason_against(self, x: Tensor, laid: Tensor) -> Reason | None:
        """Return how far off the packed layer is on `x`, in memory as in `laid`; None where that is rounding."""
        with torch.no_grad():
            other, own, found = self._both(x, laid)
            if found.shape != own.shape or found.dtype != own.dtype:
                given = f"packed, it gives {tuple(found.shape)} of {found.dtype}, and not {tuple(own.shape)}"
                return Reason.of(Cause.JUDGED_WRONG, given)
            count = 0 if self.along is None else own.shape[self.along[1]]
            numbers = torch.linspace(0, count - 1, min(count, _OUTPUTS)).round().long()
            some = None if self.along is None else numbers  # None stands for all outputs
            exact = self._exact(x, other, some)
            error = float((self._picked(own, some) - exact).abs().max())
            most = allowed_error(error, own, exact, self.terms)
            seen = distance(exact, self._picked(found, some).double(), Tolerance(0.0, most))
            if not seen.reason:
                seen = distance(own.double(), found.double(), Tolerance(0.0, most + error))
        return off_by(seen.error, error / max(scale_of(exact), _TINY)) if seen.reason else None

    def error(self, x: Tensor, laid: Tensor) -> float:
        """Return how far off the packed layer is from the layer itself, relative to the scale of its result."""
        with torch.no_grad():
            return error_of(*self._both(x, laid)[1:])

    def _both(self, x: Tensor, laid: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return what is added, and what the layer and the packed one give."""
        other = torch.ones_like(self.packed.computed(x, self.weight, self.bias)) if self.adds else None
        own = self.packed.plainly(x, self.weight, self.bias, other)
        return other, own, self.packed(laid, self.weight, self.bias, other)

    def _picked(self, result: Tensor, some: Tensor | None) -> Tensor:
        rows = result[self.rows]
        return rows if some is None or self.along is None else rows.index_select(self.along[1], some)

    def _exact(self, x: Tensor, other: Tensor | None, some: Tensor | None) -> Tensor:
        weight, bias = self.weight, self.bias
        if some is not None and self.along is not None:
            weight = weight.index_select(self.along[0], some)
            bias = None if bias is None else bias.index_select(0, some)
        added = None if other is None else self._picked(other, some).double()
        return self.packed.plainly(
            x[self.rows].double(), weight.double(), None if bias is None else bias.double(), added
        )
