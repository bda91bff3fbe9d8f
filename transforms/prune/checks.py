"""What pruning refuses before any work: options that mean nothing, weights and scores that cannot be ranked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from ...errors import UsageError, did_you_mean, expect
from ...passes.contract import Pass, check_option_types, check_options_read
from .settings import KINDS, Settings

__all__ = ["check_options", "check_score", "check_scores", "check_weights", "kept_of"]


_GOES_WITH: Mapping[str, tuple[str, ...]] = {
    "amount": ("magnitude", "random", "structured"),
    "scope": ("magnitude", "random", "structured"),
    "norm": ("structured",),
    "pattern": ("nm",),
    "permute": ("nm",),
    "schedule": ("magnitude", "random"),
    "seed": ("random", "structured"),
    "scores": ("magnitude", "nm", "structured"),
    "criterion": ("structured",),
    "kinds": ("structured",),
    "target": ("structured",),
    "round_to": ("structured",),
    "loss": ("structured",),
    "data": ("structured",),
}
"""Option -> the methods that read it."""


def check_options(options: Settings) -> None:
    """Make sure that the options of the pass mean something, each and together.

    Raises:
        UsageError: one is wrong, or says something that the method does not read.
    """
    _check_numbers(options)
    check_option_types(cast("Pass", options))
    if options.schedule != "one_shot" and options.scores is not None:
        raise UsageError("pass 'prune': a schedule ranks by magnitude, later than now; leave scores or schedule out")
    check_options_read("prune", options, "method", _GOES_WITH)


def _check_numbers(options: Settings) -> None:
    amount: object = options.amount
    if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not 0 <= amount < 1:
        raise _wrong("amount", amount, "give the share to remove, from 0 to below 1, such as 0.5")
    kept_of(options.pattern)
    if options.kinds in ((), None):
        raise _wrong("kinds", (), f"give some of {', '.join(KINDS)}, or leave it out for all")
    unknown = [kind for kind in options.kinds if kind not in KINDS] if isinstance(options.kinds, tuple) else []
    if unknown:
        raise _wrong("kinds", unknown[0], f"give some of {', '.join(KINDS)}")
    round_to: object = options.round_to
    if isinstance(round_to, bool) or not isinstance(round_to, int) or round_to < 1:
        raise _wrong("round_to", round_to, "give a number of units, 1 or more")
    if isinstance(options.seed, int) and not 0 <= options.seed < 2**63:
        raise _wrong("seed", options.seed, "give a number from 0 to below 2**63")
    if options.loss is not None and not callable(options.loss):
        raise _wrong("loss", options.loss, "give a function")
    if (options.loss is not None or options.data is not None) and options.criterion not in ("taylor", "routing"):
        raise UsageError("pass 'prune': loss= and data= are for criterion=taylor and routing; leave them out")
    if options.criterion == "routing" and options.loss is not None and options.data is None:
        raise UsageError("pass 'prune': loss= of criterion=routing runs the model on batches; give these as data=")
    if options.data is not None and options.loss is None:
        raise UsageError("pass 'prune': data= needs loss=, a function of the model and a batch")


def kept_of(pattern: str | None) -> tuple[int, int]:
    """Return N and M of a pattern "N:M"; of none given, those of 2:4.

    Raises:
        UsageError: it is none.
    """
    if pattern is None:
        return 2, 4
    match = re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", pattern) if isinstance(pattern, str) else None
    kept, of = (int(part) for part in match.groups()) if match is not None else (0, 0)
    if not 0 < kept < of:
        raise _wrong("pattern", pattern, "give N:M with N below M, such as 2:4")
    return kept, of


def _wrong(name: str, value: object, advice: str) -> UsageError:
    return UsageError(f"pass 'prune': {name}={value!r}; {advice}")


def check_weights(model: nn.Module) -> None:
    """Make sure that the weights can be ranked.

    Raises:
        UsageError: one has a NaN, or no values at all, by name.
    """
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
    """Make sure that scores are for parameters of the model, in their shapes, and can be ranked.

    Raises:
        UsageError: one is not; by name.
    """
    expect(scores, Mapping, "pass 'prune': scores", "a dictionary: name of a parameter -> tensor of its shape")
    if not scores:
        raise UsageError("pass 'prune': scores is empty; give tensors by name, or leave it out")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, score in cast("Mapping[object, object]", scores).items():
        _check_score(name, score, parameters)


def _check_score(name: object, score: object, parameters: Mapping[str, Tensor]) -> None:
    if not isinstance(name, str) or name not in parameters:
        near = did_you_mean(str(name), parameters)
        raise UsageError(f"pass 'prune': scores names {name!r}, which is no parameter of the model{near}")
    check_score(f"scores[{name!r}]", score, parameters[name])


def check_score(what: str, score: object, parameter: Tensor) -> Tensor:
    """Return the scores of a parameter.

    Raises:
        UsageError: they are none of its shape, or cannot be ranked; `what` names them.
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
