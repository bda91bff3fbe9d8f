"""Modules whose attributes are set while the model runs: what they compute cannot be verified call by call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ..tracing.capture import capture_of
from .base import Refusal, Site
from .owners import owner_of

if TYPE_CHECKING:
    from ..tracing.program import Program

__all__ = ["VOLATILE", "is_volatile", "without_volatile"]

VOLATILE = "attributes of it are set while the model runs"


def is_volatile(module: nn.Module) -> bool:
    """Say whether one of a module's own graphs sets attributes, or was traced with some that were set before."""
    capture = capture_of(module)
    return capture is not None and any(variant.volatile for variant in capture.variants)


def without_volatile(program: Program, item: Site | Refusal) -> Site | Refusal:
    """Return a refusal in the place of a site in such a module, or in a part of it that runs under a context."""
    if isinstance(item, Refusal):
        return item
    owner = owner_of(program.model, item.home).module
    return Refusal(VOLATILE, at=item.home or "(root)") if is_volatile(owner) else item
