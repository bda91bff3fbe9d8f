"""Models of which each rank holds a part (pipeline stages): what needs all of it gathers it, or refuses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn
from torch.optim import Optimizer

__all__ = ["InParts", "all_parameters", "leave_to_other_ranks", "whole_state"]


class InParts(ABC, nn.Module):
    """A part of a model; other ranks hold the others."""

    @abstractmethod
    def whole_state_dict(self) -> dict[str, Any]:
        """Return the state of all parts under the original names; every rank calls this, and gets it all."""

    @abstractmethod
    def parameters_elsewhere(self) -> dict[str, nn.Parameter]:
        """Return, by name, stand-ins for the parameters of other ranks: they have shapes, and no data."""


def all_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by name; of one in parts with stand-ins for those of other ranks."""
    elsewhere = model.parameters_elsewhere() if isinstance(model, InParts) else {}
    return {**elsewhere, **dict(model.named_parameters(remove_duplicate=not elsewhere))}


def leave_to_other_ranks(optimizer: Optimizer, model: nn.Module) -> None:
    """Take out of an optimizer, in place, the parameters of other ranks, and what it knows of them."""
    elsewhere = set(model.parameters_elsewhere().values() if isinstance(model, InParts) else ())
    for group in optimizer.param_groups if elsewhere else ():
        kept = [number for number, parameter in enumerate(group["params"]) if parameter not in elsewhere]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][number] for number in kept]
    for parameter in elsewhere:
        optimizer.state.pop(parameter, None)


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model; of one in parts that of all, for which every rank has to call this."""
    return model.whole_state_dict() if isinstance(model, InParts) else model.state_dict()
