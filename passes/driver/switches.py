"""What a pass's own code finds around it, beside the model: put back after it has run."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from ...runtime.values import RandomState

__all__ = ["switches_kept"]


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
