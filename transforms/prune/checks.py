"""What pruning refuses of a model before any work: weights and scores that cannot be ranked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from ...errors import UsageError, did_you_mean, expect

__all__ = ["check_score", "check_scores", "check_weights"]


def check_weights(model: nn.Module) -> None:
    """Raise UsageError where a weight has a NaN, or no values at all, by name."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UsageError(f"pass 'prune': '{name}' is on the meta device, and has no values; load them first")
        if _has_nan(parameter):
            raise UsageError(f"pass 'prune': '{name}' has NaN in it, and cannot be ranked; repair the model first")


def _has_nan(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return False
    return math.isnan(float(tensor.detach().sum())) and bool(torch.isnan(tensor.detach()).any())


def check_scores(scores: object, model: nn.Module) -> None:
    """Raise UsageError where scores are not for parameters of the model, in their shapes, or cannot be ranked."""
    expect(scores, Mapping, "pass 'prune': scores", "a dictionary: name of a parameter -> tensor of its shape")
    if not scores:
        raise UsageError("pass 'prune': scores is empty; give tensors by name, or leave it out")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, score in cast("Mapping[object, object]", scores).items():
        if not isinstance(name, str) or name not in parameters:
            near = did_you_mean(str(name), parameters)
            raise UsageError(f"pass 'prune': scores names {name!r}, which is no parameter of the model{near}")
        check_score(f"scores[{name!r}]", score, parameters[name])


def check_score(what: str, score: object, parameter: Tensor) -> Tensor:
    """Return the scores of a parameter; raise UsageError, where `what` names them, if they have another shape or no
    order.
    """
    shape = list(parameter.shape)
    if not isinstance(score, Tensor):
        raise UsageError(f"pass 'prune': {what} is of type {type(score).__name__}; give a tensor of shape {shape}")
    if score.shape != parameter.shape:
        raise UsageError(f"pass 'prune': {what} has shape {list(score.shape)}, the parameter {shape}")
    if score.is_complex():
        raise UsageError(f"pass 'prune': {what} has complex numbers in it, and cannot be ranked; give real ones")
    if _has_nan(score):
        raise UsageError(f"pass 'prune': {what} has NaN in it, and cannot be ranked")
    return score
