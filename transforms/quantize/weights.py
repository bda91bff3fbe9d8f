"""int8_weight, int4_weight and float8: weights in small numbers, activations as they are."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import nn

from ...compat.quantized import has_float8
from ...errors import UsageError
from ...layers.quantized import Float8Linear, Int4WeightLinear, Int8WeightLinear
from ...passes.rewriting import Edit
from ...passes.sites import Refusal, Site
from ...tracing.program import Program
from .finding import found
from .linears import Linear, linears
from .replacing import Instead, instead_of_linear, put
from .settings import Settings

__all__ = ["SCHEME"]

_LAYERS = {
    "int8_weight": ("int8", Int8WeightLinear),
    "int4_weight": ("int4", Int4WeightLinear),
    "float8": ("float8", Float8Linear),
}
_GROUPS = (32, 64, 128, 256)
_NO_FLOAT8 = "and float8 is fast on GPUs since Ada and Hopper only; aim=size holds its weight in float8 all the same"
_OUTPUTS = 16
"""The int4 kernel takes outputs in blocks of so many."""


class _Weights:
    """Quantize the weights of linear layers, and nothing else."""

    def check(self, settings: Settings, model: nn.Module) -> None:
        if settings.scheme == "int4_weight" and settings.group_size not in _GROUPS:
            known = ", ".join(map(str, _GROUPS))
            raise UsageError(f"pass 'quantize': group_size={settings.group_size}; the int4 kernel takes {known}")

    def find(self, settings: Settings, program: Program) -> Iterable[Site | Refusal]:
        layers = linears(program, partial(_objection, settings))
        return found(settings, program, layers, partial(_instead, settings))

    def rewrite(self, settings: Settings, site: Site, edit: Edit) -> None:
        put(edit, "", _instead(settings, edit.owner))


SCHEME = _Weights()


def _instead(settings: Settings, module: nn.Module) -> Instead:
    form, make = _LAYERS[settings.scheme]
    group = settings.group_size if form == "int4" else 0 if settings.per_channel else -1
    return instead_of_linear(module, make, form, group)


def _objection(settings: Settings, linear: Linear) -> str:
    if settings.scheme == "float8" and settings.aim == "speed" and not has_float8(linear.weight.device):
        return f"it is on {linear.weight.device.type}, {_NO_FLOAT8}"
    if settings.scheme != "int4_weight":
        return ""
    if linear.inputs % settings.group_size:
        return f"its {linear.inputs} inputs cannot be divided into groups of {settings.group_size}"
    if linear.outputs % _OUTPUTS:
        return f"its {linear.outputs} outputs are no multiple of {_OUTPUTS}"
    return ""
