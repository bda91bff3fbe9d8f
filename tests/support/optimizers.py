"""Optimizers from elsewhere, as short as they can be: two look at whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class _Simple(Optimizer):
    """A first moment, and a step that a subclass makes of it."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.02, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        with torch.enable_grad():
            value = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self.update(parameter, parameter.grad, self.state[parameter])
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)
        return value

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Lion(_Simple):
    """The sign of a mean of gradients: element by element."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        moment = state.setdefault("moment", torch.zeros_like(parameter))
        update = moment.lerp(gradient, 0.1) * 1e4
        moment.lerp_(gradient, 0.01)
        return update.clamp(-1, 1)


class Lamb(_Simple):
    """A step as long as the tensor's norm."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        moment = state.setdefault("moment", torch.zeros_like(parameter)).lerp_(gradient, 0.1)
        square = state.setdefault("square", torch.zeros_like(parameter)).lerp_(gradient.square(), 0.01)
        update = moment / (square.sqrt() + 1e-4)
        return update * (parameter.norm() + 0.1) / (update.norm() + 0.1)


class NovoGrad(_Simple):
    """A moment of gradients that are divided by the norm of the whole one."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        norm = gradient.norm().square()
        state["norm"] = norm if "norm" not in state else state["norm"] * 0.98 + 0.02 * norm
        moment = state.setdefault("moment", torch.zeros_like(parameter))
        return moment.mul_(0.9).add_(gradient / (state["norm"].sqrt() + 1e-3))
