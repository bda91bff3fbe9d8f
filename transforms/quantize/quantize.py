"""The pass: layers computed with small integers or floats."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...errors import UsageError
from ...passes.contract import check_named
from ...passes.rewriting import Edit
from ...passes.sites import Goal, Phase, Refusal, Site
from ...tracing.program import Program
from . import layerwise, static
from .find import Found
from .options import SCHEMES, Options, check_options

__all__ = ["Quantize"]


@dataclass(frozen=True)
class Quantize(Options):
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
        baseline: what a layer must be faster than: itself, or, with `bfloat16`, itself packed in bfloat16: that is
            then left to `pack{dtype=bfloat16}`.
        calibration: for `int8_static`, methods but `rtn`, and `bias_correction`: a loader, an iterator or a list of
            batches; the option text leaves it out. None stands for the example inputs.
        method: how the numbers of weights are found: `rtn` rounds each to the nearest; `gptq` lets weights make up for
            the errors of others, `awq` and `smoothquant` scale inputs, all by calibration data.
        alpha: of `smoothquant`: 1 leaves nothing of the differences between inputs to the activations, 0 all; without
            it each layer has the one that errs least.
        damp: of `gptq`: so much of the mean of the Hessian's diagonal is added to it.
        act_order: of `gptq`: weights of the largest inputs are rounded first.
        bias_correction: the mean error of each output over the calibration data goes to the bias.
        bits: of `int4_weight`: `mixed` holds layers in 8 bits that 4 would take out of the budget.
        observer: for `int8_static`: how the range of an activation is found: `histogram` cuts off what is rare,
            `minmax` nothing, `moving_average` what batches differ by.
        batches: how many batches of `calibration` are used.
        metric: a function that takes the model and returns a number, larger for better. It is what the whole model is
            judged by, in the place of `budget`, which is then 0.5; the option text leaves it out.
        drop: how much of the metric may be lost, in its own units; by default 0.01.
    """

    @classmethod
    def searched(cls, phase: Phase, goals: Collection[Goal]) -> Mapping[str, Sequence[Any]] | None:
        if phase is not Phase.EVAL:
            return None
        if set(goals) <= {Goal.SPEED}:
            return {"scheme": ("int8_dynamic", "int8_static", "int8_weight", "int4_weight")}
        return {"scheme": SCHEMES, "aim": ("speed", "size")}

    def check(self, model: nn.Module) -> None:
        check_options(self)
        check_named(self.name, "keep", self.keep, model)
        if all(module.training for module in model.modules()):
            raise UsageError("pass 'quantize' is for evaluation, and the model is in training; call model.eval() first")

    def find(self, program: Program) -> Iterable[Site | Refusal]:
        return static.find(self, program) if self.scheme == "int8_static" else layerwise.find(self, program)

    def judgement(self, site: Site) -> Mapping[str, Any]:
        found = site.found
        return found.judgement.all_figures if isinstance(found, Found) else {}

    def rewrite(self, site: Site, edit: Edit) -> None:
        if self.scheme == "int8_static":
            static.rewrite(site, edit, self.group)
        else:
            layerwise.rewrite(self, site, edit)
