"""The options of each scheme, the contract of the pass with them, and what is refused of them before any work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn

from ...compat.quantized import OBSERVERS, why_no_int8, why_no_static_int8
from ...errors import UsageError, did_you_mean
from ...passes.contract import Pass, check_options_read, module_words
from ...passes.sites import Goal, Numerics, OwnForward, Phase
from ..calibration import replayable

__all__ = ["SCHEMES", "Options", "check_options"]

Scheme = Literal["int8_dynamic", "int8_static", "int8_weight", "int4_weight", "float8"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)


@dataclass(frozen=True)
class Options(Pass):
    """What the user asks for, and the contract that follows from it; `Quantize` says what each option means."""

    scheme: Scheme = "int8_dynamic"
    keep: tuple[str, ...] = ()
    budget: float | None = None
    per_channel: bool = True
    group_size: int = 64
    aim: Literal["speed", "size"] = "speed"
    baseline: torch.dtype = torch.float32
    observer: Literal["histogram", "minmax", "moving_average"] = "histogram"
    batches: int = 32
    method: Literal["rtn", "gptq", "awq", "smoothquant"] = "rtn"
    alpha: float | None = None
    damp: float = 0.01
    act_order: bool = False
    bias_correction: bool = False
    bits: Literal["same", "mixed"] = "same"
    calibration: Any = field(default=None, compare=False, repr=False)
    drop: float | None = field(default=None, compare=False, repr=False)  # of the metric, which no plan holds
    metric: Callable[[nn.Module], float] | None = field(default=None, compare=False, repr=False)

    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    phase: ClassVar[Phase] = Phase.EVAL
    trainable: ClassVar[bool] = False
    own_forward: ClassVar[OwnForward | None] = OwnForward.RIGHT  # what is replaced is in its place there, too

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", module_words(self.name, "keep", self.keep))
        object.__setattr__(self, "calibration", replayable(self.calibration))
        for name, value in self._contract().items():
            object.__setattr__(self, name, value)

    def _contract(self) -> dict[str, Any]:
        """Return the part of the pass's contract that its options decide."""
        is_static = self.scheme == "int8_static"
        contract = {
            "goal": Goal.SIZE if self.aim == "size" else Goal.SPEED,
            "profiles_itself": not is_static,
            "yields": self.aim == "speed" and self.baseline is torch.bfloat16,  # the fastest of three types is taken
        }
        if is_static:  # it folds norms, and leaves the others as they were
            return {**contract, "includes": ("fold_batchnorm", *self.includes)}
        return {**contract, "destroys": {**self.destroys, "fold_batchnorm": "it works on the weights as they were"}}

    @property
    def error_budget(self) -> float:
        if self.budget is not None:
            return super().error_budget
        return _BUDGETS.get(str(self.scheme), _BUDGET) if self.metric is None else _BUDGET_BESIDE_METRIC

    @property
    def allowed_drop(self) -> float:
        """Return by how much the metric may fall."""
        return _DROP if self.drop is None else self.drop

    @property
    def calibrates(self) -> bool:
        """Say whether weights are rounded by what data say of their inputs."""
        return self.method != "rtn" or self.bias_correction

    @property
    def levels(self) -> tuple[Options, ...]:
        """Return the options for layers with more bits, which are tried first, and these."""
        return (self,) if self.bits == "same" else (replace(self, scheme="int8_weight", group_size=64), self)

    @property
    def group(self) -> int:
        """Return how many weights have a scale in common: 0 is those of an output, -1 is all."""
        return self.group_size if self.scheme == "int4_weight" else 0 if self.per_channel else -1


_BUDGET = 0.05
_BUDGETS = {"int4_weight": 0.2, "float8": 0.1}
_BUDGET_BESIDE_METRIC = 0.5
"""A layer that errs by more gives other results, whatever a metric sees of it."""
_DROP = 0.01

_READ_BY = {
    "per_channel": ("int8_dynamic", "int8_static", "int8_weight", "float8"),
    "group_size": ("int4_weight",),
    "baseline": ("int8_dynamic", "int8_weight", "int4_weight"),
    "observer": ("int8_static",),
    "bits": ("int4_weight",),
    "bias_correction": ("int8_dynamic", "int8_weight", "int4_weight"),
}
"""Option -> the schemes that read it; all read the others."""

_OF_DATA = dict.fromkeys(("batches", "calibration"), ("int8_static",))
"""The same of options that methods read, too, which look at data."""

_READ_BY_METHOD = {"alpha": ("smoothquant",), "damp": ("gptq",), "act_order": ("gptq",)}

_OF_METHOD = {
    "gptq": ("int8_dynamic", "int8_static", "int8_weight", "int4_weight"),
    "awq": ("int8_weight", "int4_weight"),
    "smoothquant": ("int8_dynamic", "int8_static"),
}
"""Method -> the schemes that it finds numbers for; `rtn` is for all."""

_GROUPS = (32, 64, 128, 256)


def check_options(options: Options) -> None:
    """Raise UsageError where an option is wrong, or not read by the scheme, or the scheme does not run here."""
    scheme = options.scheme
    if scheme not in SCHEMES:
        raise _wrong(f"scheme={scheme!r} is unknown{did_you_mean(scheme, SCHEMES)}")
    if options.aim not in ("speed", "size"):
        raise _wrong(f"aim={options.aim!r}; use 'speed' or 'size'")
    if options.baseline not in (torch.float32, torch.bfloat16):
        raise _wrong(f"baseline={str(options.baseline).removeprefix('torch.')}; use float32 or bfloat16")
    for name, value, such in (("group_size", options.group_size, 64), ("batches", options.batches, 32)):
        if isinstance(value, bool) or value < 1:
            raise _wrong(f"{name}={value}; give a positive number, such as {such}")
    if options.observer not in OBSERVERS:
        raise _wrong(f"observer={options.observer!r} is unknown{did_you_mean(str(options.observer), OBSERVERS)}")
    _check_metric(options)
    check_options_read("quantize", options, "scheme", _READ_BY if options.calibrates else {**_READ_BY, **_OF_DATA})
    _check_method(options)
    _ = options.error_budget
    if scheme == "int4_weight" and options.group_size not in _GROUPS:
        raise _wrong(f"group_size={options.group_size}; the int4 kernel takes {', '.join(map(str, _GROUPS))}")
    reason = {"int8_dynamic": why_no_int8, "int8_static": why_no_static_int8}.get(scheme, str)()
    if reason:
        raise _wrong(f"scheme={scheme} does not run here: {reason}")


def _check_method(options: Options) -> None:
    method, scheme = options.method, options.scheme
    if method in _OF_METHOD and scheme not in _OF_METHOD[method]:
        able = ["rtn", *(name for name, schemes in _OF_METHOD.items() if scheme in schemes)]
        raise _wrong(
            f"method={method} is for scheme={' or '.join(_OF_METHOD[method])}, not for {scheme}, which takes "
            f"method={' or '.join(able)}"
        )
    check_options_read("quantize", options, "method", _READ_BY_METHOD)
    if options.alpha is not None and not 0 <= options.alpha <= 1:
        raise _wrong(f"alpha={options.alpha}; give a number from 0 (all to the weights) to 1")
    if not 0 < options.damp <= 1:
        raise _wrong(f"damp={options.damp}; give a share of the mean of the Hessian's diagonal, such as 0.01")


def _check_metric(options: Options) -> None:
    if options.drop is not None and (options.metric is None or not options.drop >= 0):
        raise _wrong(f"drop={options.drop}; give a metric= with it, and how much of that may be lost, such as 0.005")
    if options.metric is not None and not callable(options.metric):
        raise _wrong("metric= is no function; give one that takes the model and returns a number, larger for better")


def _wrong(said: str) -> UsageError:
    return UsageError(f"pass 'quantize': {said}")
