"""What all layers with small numbers have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...compat import is_plainly_eager, modules_by_name, own_buffers, runs_kernels, wants_gradients
from ...compat.quantized import empty_tensor, is_simulating, runs_simulation, without_torch_function
from ...errors import UsageError
from ...operators import Cache
from ...runtime.state import dequantized
from ...runtime.values import user_class

__all__ = [
    "ASKED",
    "HeldWeight",
    "HoldsWeight",
    "QuantizedLayer",
    "check_in_floats",
    "is_finite",
    "is_plain_call",
    "is_quantized_by_torch",
]


class QuantizedLayer(nn.Module):
    """Be one operation for whoever traces a model; keep a packed form that copies and pickles leave out.
    The buffers keep their types: `.half()` and the like change the parameters only.
    """

    _fxopt_is_operation: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.packing = Cache()

    def __setattr__(self, name: str, value: Any) -> None:
        made = getattr(type(self), name, None)
        if isinstance(made, property) and made.fset is None:
            raise UsageError(
                f"'{name}' of this {type(self).__name__} is made of small numbers and cannot be replaced; change the "
                "plain model (fxopt.restore gives it back), then quantize it again"
            )
        super().__setattr__(name, value)

    def train(self, mode: bool = True) -> Any:
        """Set the mode; the packed form is made anew, for fused optimizers write what torch does not count."""
        self.packing.forget_all()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.packing.forget_all()
        buffers = own_buffers(self)
        before = dict(buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                buffers[name] = old.to(new.device)
        return self


class HoldsWeight(QuantizedLayer):
    """Hold the weight of a linear layer or a convolution as small numbers with scales, see `quantized`.
    `dtype` is that of the weight they stand for, `dim` its dimension of outputs; the bias [outputs] stays.
    """

    form: ClassVar[str] = "int8"
    bias: nn.Parameter | None

    def __init__(
        self, values: Tensor, scales: Tensor, bias: nn.Parameter | None, dtype: torch.dtype, dim: int = 0
    ) -> None:
        super().__init__()
        self.register_buffer("weight_values", values)
        self.register_buffer("weight_scales", scales)
        self.register_parameter("bias", bias)
        self.dtype, self.dim = dtype, dim

    @property
    def weight(self) -> Tensor:
        """Return the weight that the numbers stand for, made when it is used; writing into it changes nothing."""
        if runs_simulation() or not is_plainly_eager():
            return self._original()
        values, _ = self.held
        shape = list(values.shape)
        if self.form == "int4":
            shape[-1] *= 2
        shape.insert(self.dim, shape.pop(0))
        return HeldWeight(self._original, torch.Size(shape), self.dtype, values.device)

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """Return the numbers and the scales."""
        buffers = own_buffers(self)
        return cast("Tensor", buffers["weight_values"]), cast("Tensor", buffers["weight_scales"])

    def wide_weight(self) -> Tensor:
        """Return the floats that the numbers stand for, [outputs, ...]."""
        return dequantized(*self.held, self.form, self.dtype)

    def _original(self) -> Tensor:
        factors, weight = own_buffers(self).get("factors"), self.wide_weight()
        return (weight if factors is None else weight * factors.to(weight.dtype)).movedim(0, self.dim)


def check_in_floats(pass_name: str, model: nn.Module) -> None:
    """Raise a UsageError for a model with layers that have no weight in floats any more, with the first of them."""
    modules: dict[str, nn.Module] = modules_by_name(model)
    name = next((name for name, module in modules.items() if isinstance(module, QuantizedLayer)), None)
    if name is not None:
        raise UsageError(
            f"pass '{pass_name}': '{name}' is quantized already; run it on the model as it was, "
            "or on fxopt.restore(model)"
        )


def is_quantized_by_torch(module: nn.Module) -> bool:
    """Say whether a module is one of torch's own quantized layers, which hold no tensors, but packed weights."""
    return user_class(type(module)).__module__.startswith("torch.ao.nn.quantized") and hasattr(module, "weight")


def is_finite(x: Tensor) -> bool:
    """Say whether no element of a tensor is infinite or NaN, of which kernels for integers know nothing."""
    return math.isfinite((x.detach() if x.requires_grad else x).sum().item())


def is_plain_call(x: Tensor, *parameters: Tensor | None) -> bool:
    """Say whether a layer is called as it mostly is: eagerly on a CPU, without autocast, and nobody wants gradients."""
    if wants_gradients(x, *parameters):
        return False
    return type(x) is Tensor and x.is_cpu and x.numel() > 0 and runs_kernels() and not is_simulating()


ASKED = frozenset({"device", "dtype", "is_cpu", "is_cuda", "is_meta", "layout", "ndim", "requires_grad", "shape"})
"""The attributes that a weight answers without being made."""

_METHODS = {getattr(Tensor, name) for name in ("dim", "is_floating_point", "numel", "size")}


class HeldWeight(Tensor):
    """Answer for shape, type and device at no cost; for anything else be made of floats, anew each time."""

    make: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls: type[HeldWeight], make: Callable[[], Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> HeldWeight:
        weight: HeldWeight = empty_tensor(cls, shape, dtype, device)
        weight.make = make
        return weight

    def __init__(self, make: Callable[[], Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        """Be what `__new__` made."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METHODS or getattr(getattr(func, "__self__", None), "__name__", None) in ASKED:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(_made, (args, kwargs or {}))
        return func(*args, **kwargs)


def _made(value: object) -> object:
    return value.make() if isinstance(value, HeldWeight) else value
