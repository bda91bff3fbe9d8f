"""Models of which each rank holds a part (pipeline stages): what needs all of it gathers it, or refuses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

__all__ = ["InParts", "whole_state"]


class InParts(ABC, nn.Module):
    """A part of a model; other ranks hold the others."""

    @abstractmethod
    def whole_state_dict(self) -> dict[str, Any]:
        """Return the state of all parts under the original names; every rank calls this, and gets it all."""


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model; of one in parts that of all, for which every rank has to call this."""
    return model.whole_state_dict() if isinstance(model, InParts) else model.state_dict()
