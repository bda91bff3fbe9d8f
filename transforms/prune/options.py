"""The options of each method, and what is refused of them and of a model before any work."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from ...errors import UsageError, did_you_mean, expect
from ...operators import why_not_plain
from ...passes.contract import Pass, check_option_types, check_options_read, module_words

__all__ = ["Kind", "Options", "check_names", "check_score", "check_scores", "check_weights"]

Kind = Literal["channels", "heads", "hidden", "experts", "blocks"]
"""What a unit is: a channel of convolutions, an attention head, a hidden unit of linears, a whole expert or block."""

KINDS: tuple[Kind, ...] = get_args(Kind)

_BY_DEFAULT = KINDS[:-1]

Scores = Mapping[str, Tensor] | Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Options(Pass):
    """What the user asks for; `Prune` says what each option means."""

    method: Literal["magnitude", "random", "nm", "structured"] = "magnitude"
    amount: float = 0.5
    scope: Literal["global", "layer", "row"] = "global"
    norm: Literal["l1", "l2"] = "l2"
    pattern: str | None = None
    permute: bool = False
    keep: tuple[str, ...] = ()
    schedule: Literal["one_shot", "linear", "cubic"] = "one_shot"
    seed: int = 0
    criterion: Literal[
        "magnitude", "lamp", "fpgm", "batchnorm", "taylor", "hessian", "wanda", "routing", "influence", "random"
    ] = "magnitude"  # fmt: skip
    kinds: tuple[Kind, ...] = _BY_DEFAULT
    target: Literal["units", "parameters", "flops", "latency"] = "units"
    round_to: int = 1
    scores: Scores | None = field(default=None, compare=False, repr=False)
    loss: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    data: Iterable[Any] | None = field(default=None, compare=False, repr=False)
    ratios: Mapping[str, float] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", module_words(self.name, "keep", self.keep))
        kinds: object = self.kinds
        if isinstance(kinds, (str, list)):
            object.__setattr__(self, "kinds", (kinds,) if isinstance(kinds, str) else tuple(self.kinds))
        _check_numbers(self)
        check_option_types(self)
        if self.schedule != "one_shot" and self.scores is not None:
            raise UsageError(
                "pass 'prune': a schedule ranks by magnitude, later than now; leave scores or schedule out"
            )
        if self.schedule != "one_shot" and self.permute:
            raise UsageError("pass 'prune': a schedule groups inputs as they lie; leave permute or schedule out")
        check_options_read("prune", self, "method", _READ_BY)
        _check_shares(self)

    def share_of(self, layer: str) -> float:
        """Return the share that goes of a layer: that of the first name in `ratios` that fits, or `amount`."""
        fitting = (share for name, share in (self.ratios or {}).items() if fnmatchcase(layer, name))
        return next(fitting, self.amount)

    @property
    def kept_of(self) -> tuple[int, int]:
        """Return N and M of the pattern "N:M"; of none given, those of 2:4."""
        pattern = "2:4" if self.pattern is None else self.pattern
        match = re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", pattern) if isinstance(pattern, str) else None
        kept, of = (int(part) for part in match.groups()) if match is not None else (0, 0)
        if not 0 < kept < of:
            raise _wrong("pattern", pattern, "give N:M with N below M, such as 2:4")
        return kept, of


_READ_BY = {
    "amount": ("magnitude", "random", "structured"),
    "scope": ("magnitude", "random", "structured"),
    "schedule": ("magnitude", "random", "nm"),
    "seed": ("random", "structured"),
    "scores": ("magnitude", "nm", "structured"),
    **dict.fromkeys(("pattern", "permute"), ("nm",)),
    "ratios": ("magnitude", "random", "structured"),
    "criterion": ("magnitude", "nm", "structured"),
    **dict.fromkeys(("norm", "kinds", "target", "round_to"), ("structured",)),
}
"""Option -> the methods that read it; all read the others, or none without `criterion`."""


def _check_numbers(options: Options) -> None:
    amount, round_to, kinds = cast("tuple[Any, ...]", (options.amount, options.round_to, options.kinds))
    if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not 0 <= amount < 1:
        raise _wrong("amount", amount, "give the share to remove, from 0 to below 1, such as 0.5")
    _ = options.kept_of
    if kinds in ((), None):
        raise _wrong("kinds", (), f"give some of {', '.join(KINDS)}, or leave it out for all but blocks")
    for kind in cast("tuple[object, ...]", kinds) if isinstance(kinds, tuple) else ():
        if kind not in KINDS:
            raise _wrong("kinds", kind, f"give some of {', '.join(KINDS)}")
    if isinstance(kinds, tuple) and "blocks" in kinds and len(options.kinds) > 1:
        raise _wrong(
            "kinds", options.kinds, "blocks go in a call of their own: give kinds=blocks, and prune the rest after it"
        )
    if isinstance(round_to, bool) or not isinstance(round_to, int) or round_to < 1:
        raise _wrong("round_to", round_to, "give a number of units, 1 or more")
    if isinstance(options.seed, int) and not 0 <= options.seed < 2**63:
        raise _wrong("seed", options.seed, "give a number from 0 to below 2**63")


def _check_shares(options: Options) -> None:
    """Make sure that each layer's share is one, and that the scope asks for shares of layers."""
    ratios: object = options.ratios
    if options.scope == "row" and options.method == "structured":
        raise UsageError("pass 'prune': scope=row is of single weights; units are in no row: give scope=layer")
    if ratios is None:
        return
    expect(ratios, Mapping, "pass 'prune': ratios", "a dictionary: name of a layer, which may hold `*` -> share")
    if options.scope == "global" or options.target != "units" or options.schedule != "one_shot":
        raise UsageError(
            "pass 'prune': ratios= are shares of single layers, removed at once; give scope=layer, no target and no "
            "schedule"
        )
    for name, share in cast("Mapping[object, object]", ratios).items():
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
            raise _wrong(f"ratios[{name!r}]", share, "give the share to remove, from 0 to below 1")


def check_names(options: Options, layers: Sequence[str]) -> None:
    """Raise UsageError where `ratios` names no layer that is pruned."""
    for name in options.ratios or ():
        if not any(fnmatchcase(layer, name) for layer in layers):
            near = did_you_mean(name, layers)
            raise UsageError(f"pass 'prune': ratios names {name!r}, which is no layer that is pruned{near}")


def _wrong(name: str, value: object, advice: str) -> UsageError:
    return UsageError(f"pass 'prune': {name}={value!r}; {advice}")


def check_weights(model: nn.Module) -> None:
    """Raise UsageError where a weight has a NaN, or no values at all, by name."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UsageError(f"pass 'prune': '{name}' is on the meta device, and has no values; load them first")
        try:
            has_nan = _has_nan(parameter)
        except NotImplementedError as error:  # as those of torchao, which know few operations
            said = f"'{name}' {why_not_plain(parameter)}"
            raise UsageError(f"pass 'prune': {said}; prune the model before it is quantized") from error
        if has_nan:
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
    """Return the scores of a parameter; UsageError: they have another shape or no order. `what` names them."""
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
