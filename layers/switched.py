"""Linear layers of N members that take one lowering or another by the number of rows, on the same stacked weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..passes.switching import rows_of
from .ensemble import batched_linear, grouped_linear, shared_batched_linear, shared_grouped_linear, wide_linear

__all__ = ["has_more_rows", "switched_linear"]

_SHARED: Mapping[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "wide": wide_linear, "bmm": shared_batched_linear, "grouped_conv": shared_grouped_linear,
}  # fmt: skip
_SEPARATE: Mapping[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "wide": batched_linear, "bmm": batched_linear, "grouped_conv": grouped_linear,
}  # fmt: skip


def has_more_rows(x: Tensor, limit: int) -> bool:
    """Say whether `x`, [*, features], has more than `limit` rows; always, where the model is being exported.

    An exported program has one graph for all sizes: it gets the lowering for large ones. `torch.compile` compiles both.
    """
    return torch.compiler.is_exporting() or rows_of(x) > limit


def switched_linear(
    many: bool, small: str, large: str, shared: bool, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Apply N linears by the lowering called `large` where `many`, else by the one called `small`.

    Args:
        many: what `has_more_rows` says of the input of the ensemble.
        small, large: "wide", "bmm" or "grouped_conv".
        shared: whether all members read `x`.
        x: [*, in] if `shared`, else [N, *, in].
        weight: [N, out, in].
        bias: [N, out].

    Returns:
        [N, *, out].
    """
    return (_SHARED if shared else _SEPARATE)[large if many else small](x, weight, bias)
