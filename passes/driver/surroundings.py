"""What a pass's own code finds around it: put back after it has run, and when its rewrite is undone."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...compat import all_modules
from ...tracing.recording import AttributeState
from ...tracing.values import RandomState, all_tensors

__all__ = ["Surroundings", "switches_kept"]


@contextmanager
def switches_kept() -> Generator[None]:
    """Put the random streams, the gradient mode and the default type back, whatever the code inside does to them."""
    generators, grad, dtype = RandomState(), torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        generators.restore()
        torch.set_grad_enabled(grad)
        if torch.get_default_dtype() is not dtype:
            torch.set_default_dtype(dtype)


class Surroundings:
    """Hold what a model is before a rewrite, to put back what the journal of the edit does not know of.

    These are each module's class, children in their order, attributes, hooks and mode, and each tensor's gradient and
    whether it wants one. What tensors hold is the edit's business.

    Args:
        model: whose modules the rewrite may change.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = all_modules(model)
        self._classes = [(module, type(module)) for module in modules]
        self._attributes = [AttributeState(module) for module in modules]
        self._tensors = [(t, t.requires_grad, t.grad) for t in all_tensors(modules) if t.is_leaf]

    def settle(self) -> None:
        """Keep no more than what takes back the changes that there are now."""
        self._attributes = [state for state in self._attributes if state.changed()]
        self._classes = [(module, cls) for module, cls in self._classes if type(module) is not cls]
        self._tensors = [kept for kept in self._tensors if _is_changed(*kept)]

    def restore(self) -> None:
        """Put everything back."""
        for state in self._attributes:
            state.restore(exact=True)
        for module, cls in self._classes:
            if type(module) is not cls:
                object.__setattr__(module, "__class__", cls)  # no module's own way of setting attributes is asked
        for tensor, wanted, gradient in self._tensors:
            if _is_changed(tensor, wanted, gradient):
                tensor.requires_grad_(wanted)
                tensor.grad = gradient


def _is_changed(tensor: Tensor, wanted: bool, gradient: Tensor | None) -> bool:
    return tensor.requires_grad != wanted or tensor.grad is not gradient
