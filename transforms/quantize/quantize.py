"""The pass: layers computed with small integers or floats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from torch import nn

from ...errors import UsageError, did_you_mean
from ...passes.contract import Pass, check_named, check_options_read, module_words
from ...passes.kinds import Judgement
from ...passes.rewriting import Edit
from ...passes.sites import Goal, Numerics, OwnForward, Phase, Refusal, Site
from ...tracing.program import Program
from ..calibration import replayable
from .layerwise import LAYER_SCHEMES
from .schemes import Scheme, SchemeName, Settings
from .static import Static

__all__ = ["Quantize"]

_SCHEMES: Mapping[str, Scheme] = {**LAYER_SCHEMES, "int8_static": Static()}
SCHEMES = {name: _SCHEMES[name] for name in get_args(SchemeName)}
_READ_BY = {
    option: tuple(name for name, scheme in SCHEMES.items() if option in scheme.options)
    for option in dict.fromkeys(option for scheme in SCHEMES.values() for option in scheme.options)
}
"""Option -> the schemes that read it."""


@dataclass(frozen=True)
class Quantize(Pass, Settings):
    """Compute linear layers and LSTMs with integers of 8 bits, or hold weights in 8 or 4 bits.

    Before: nn.Linear, weights in float32        After: a layer in its place, weights in int8, int4 or float8
    Refuses: tied weights, layers with hooks, weights that other code reads, layers that are never called.

    Options:
        scheme: `int8_dynamic` (activations are quantized at each call), `int8_static` (with scales that calibration
            found), `int8_weight`, `int4_weight` and `float8` (weights alone).
        keep: what stays as it is: names of modules, which may hold `*`, or their classes.
        budget: the error that is allowed, relative to the scale of each tensor; by default 0.05, of `float8` 0.1 and of
            `int4_weight` 0.2.
        per_channel: one scale for each output of an int8 layer, or one for all.
        group_size: how many weights of an `int4_weight` layer have a scale in common.
        aim: `speed` times each layer and leaves those alone that do not gain; `size` does not.
        calibration: for `int8_static`: a loader, an iterator or a list of batches; the option text leaves it out. None
            stands for the example inputs.
        observer: for `int8_static`: how the range of an activation is found: `histogram` cuts off what is rare,
            `minmax` nothing, `moving_average` what batches differ by.
        batches: for `int8_static`: how many batches of `calibration` are used.
    """

    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    phase: ClassVar[Phase] = Phase.EVAL
    trainable: ClassVar[bool] = False
    profiles_itself: ClassVar[bool] = True
    own_forward: ClassVar[OwnForward | None] = OwnForward.RIGHT  # what is replaced is in its place there, too

    @property
    def error_budget(self) -> float:
        return SCHEMES.get(str(self.scheme), Scheme).budget if self.budget is None else super().error_budget

    def __post_init__(self) -> None:
        scheme = SCHEMES.get(str(self.scheme))
        object.__setattr__(self, "goal", Goal.SIZE if self.aim == "size" else Goal.SPEED)
        object.__setattr__(self, "profiles_itself", scheme is None or scheme.profiles_itself)
        if scheme is not None and scheme.folds_norms:  # and leaves the other norms as they were
            object.__setattr__(self, "includes", ("fold_batchnorm", *self.includes))
        else:
            why = "it works on the weights as they were"
            object.__setattr__(self, "destroys", {**self.destroys, "fold_batchnorm": why})
        object.__setattr__(self, "keep", module_words(self.name, "keep", self.keep))
        object.__setattr__(self, "calibration", replayable(self.calibration))

    def check(self, model: nn.Module) -> None:
        if self.scheme not in SCHEMES:
            raise UsageError(f"pass 'quantize': scheme={self.scheme!r} is unknown{did_you_mean(self.scheme, SCHEMES)}")
        if self.aim not in ("speed", "size"):
            raise UsageError(f"pass 'quantize': aim={self.aim!r}; use 'speed' or 'size'")
        if isinstance(self.group_size, bool) or self.group_size < 1:
            raise UsageError(f"pass 'quantize': group_size={self.group_size}; give a positive number, such as 64")
        check_options_read("quantize", self, "scheme", _READ_BY)
        check_named(self.name, "keep", self.keep, model)
        if all(module.training for module in model.modules()):
            raise UsageError("pass 'quantize' is for evaluation, and the model is in training; call model.eval() first")
        _ = self.error_budget
        SCHEMES[self.scheme].check(self, model)

    def find(self, program: Program) -> Iterable[Site | Refusal]:
        return SCHEMES[self.scheme].find(self, program)

    def judgement(self, site: Site) -> Mapping[str, Any]:
        found = site.found
        return found.all_figures if isinstance(found, Judgement) else {}

    def rewrite(self, site: Site, edit: Edit) -> None:
        SCHEMES[self.scheme].rewrite(self, site, edit)
