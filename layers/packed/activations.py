"""The activations that oneDNN computes together with what comes before them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["NO_ACTIVATION", "Activation", "known_activations"]


@dataclass(frozen=True)
class Activation:
    """An element-by-element function behind a product."""

    operator: str = ""
    fixed: tuple[tuple[str, Any], ...] = ()  # arguments by name
    free: tuple[str, ...] = ()  # names of the `numbers` that it reads
    numbers: tuple[float, ...] = ()
    kernel: str = ""  # what oneDNN calls it; "" where there is none that is right
    kind: str = ""

    @property
    def post_op(self) -> tuple[str, list[float], str]:
        """Return what the kernel of a product computes of it, as `compat.packed` takes it."""
        return (self.kernel, list(self.numbers), self.kind) if self.kernel else ("none", [], "")

    def having(self, numbers: tuple[float, ...]) -> Activation:
        """Return it with its numbers. A leaky ReLU without a slope is one, of which the kernel makes numbers of NaN."""
        is_relu = self.operator == "leaky_relu" and numbers == (0.0,)
        return dataclasses.replace(self, numbers=numbers, kernel="" if is_relu else self.kernel)

    def __call__(self, x: Tensor) -> Tensor:
        return _FUNCTIONS[self.operator](x, **self._arguments) if self.operator else x

    @property
    def in_place(self) -> Callable[[Tensor], Tensor]:
        """Return what computes it, in place where torch can, with as little of Python around it as there can be."""
        if self.operator == "relu":
            return Tensor.relu_
        if self.operator in ("relu6", "hardtanh"):
            low, high = self.numbers or (0.0, 6.0)
            if low <= high:  # torch refuses others by name
                return lambda x: x.clamp_(low, high)
        if self.operator in _IN_PLACE:
            return partial(_FUNCTIONS[self.operator], **self._arguments, inplace=True)
        return self

    @property
    def as_function(self) -> tuple[Callable[..., Tensor], dict[str, Any]]:
        """Return torch's function of it, and what that is given besides the input."""
        return _FUNCTIONS[self.operator], self._arguments

    @property
    def _arguments(self) -> dict[str, Any]:
        return {**dict(self.fixed), **dict(zip(self.free, self.numbers, strict=True))}

    def __str__(self) -> str:
        return self.operator or "nothing"


NO_ACTIVATION = Activation()

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "relu": torch.relu, "gelu": F.gelu, "silu": F.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid, "leaky_relu": F.leaky_relu, "hardtanh": F.hardtanh,
    "relu6": F.relu6,
}  # fmt: skip

_IN_PLACE = ("hardsigmoid", "hardtanh")

_KNOWN = (
    Activation("relu"),
    Activation("gelu", (("approximate", "none"),), kernel="gelu", kind="none"),
    Activation("gelu", (("approximate", "tanh"),), kernel="gelu", kind="tanh"),
    Activation("silu", kernel="swish"),
    Activation("sigmoid", kernel="sigmoid"),
    Activation("tanh", kernel="tanh"),
    Activation("hardswish", kernel="hardswish"),
    Activation("hardsigmoid"),
    Activation("leaky_relu", free=("negative_slope",), kernel="leaky_relu"),
    Activation("hardtanh", free=("min_val", "max_val")),
    Activation("relu6"),
)


def known_activations() -> Iterator[Activation]:
    """Yield the activations, those with numbers without them; ReLU first."""
    return iter(_KNOWN)
