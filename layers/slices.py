"""Slices of stacked parameters, as code that reaches for a member's parameter gets them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import FusedMemberError

__all__ = ["ADVICE", "Slice", "write"]

ADVICE = "fxopt.restore(model) gives the original structure back, with the current weights"


class Slice(Tensor):
    """A slice of a stacked parameter: setting its `data` writes there; what is computed from it is a plain tensor."""

    __torch_function__ = cast("Any", nn.Parameter.__torch_function__)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        write(self, value, "this tensor")


def write(member: Tensor, value: Tensor, what: str) -> None:
    """Copy a tensor into a slice of a stacked one, of the same shape, called `what`.

    Raises:
        FusedMemberError: if it has another shape, or is more than a plain tensor (quantized, say).
    """
    if type(value) is not type(member) and type(value) not in (Tensor, nn.Parameter, Slice):
        raise FusedMemberError(
            f"{what} is a slice of a stacked parameter and cannot become of type {type(value).__name__}; "
            f"quantize the model first, then optimize it. {ADVICE}"
        )
    if value.shape != member.shape:
        raise FusedMemberError(
            f"{what} is a slice of a stacked parameter and keeps its shape {list(member.shape)}; a tensor of "
            f"shape {list(value.shape)} cannot be copied into it. {ADVICE}"
        )
    with torch.no_grad():
        member.copy_(value)
