"""Optimizers that have a fused form on a CPU, and which of their kernels run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import optim
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda given: optim.AdamW(given, lr=0.05, amsgrad=True),
    "adam": lambda given: optim.Adam(given, lr=0.05, weight_decay=0.1),
    "sgd": lambda given: optim.SGD(given, lr=0.05, momentum=0.9, nesterov=True),
    "dampened": lambda given: optim.SGD(given, lr=0.05, momentum=0.9, dampening=0.5),
    "adagrad": lambda given: optim.Adagrad(given, lr=0.05),
}


class Kernels(TorchDispatchMode):
    """Counts the fused kernels that are called."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_fused_" in str(func)
        return func(*args, **(kwargs or {}))
