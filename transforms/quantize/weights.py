"""int8_weight, int4_weight and float8: weights in small numbers, activations as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from ...compat.quantized import has_float8
from ...errors import UsageError
from ...layers.quantized import Float8Linear, Int4WeightLinear, Int8WeightLinear, QuantizedLinear
from ...passes.rewriting import Edit, Layer
from ...passes.sites import Refusal, Site
from ...tracing.program import Program
from .find import found
from .layers import linears
from .schemes import Scheme, Settings
from .write import Instead, instead_of_linear, put

__all__ = ["WEIGHT_SCHEMES"]

_GROUPS = (32, 64, 128, 256)
_NO_FLOAT8 = "and float8 is fast on GPUs since Ada and Hopper only; aim=size holds its weight in float8 all the same"
_OUTPUTS = 16
"""The int4 kernel takes outputs in blocks of so many."""


@dataclass(frozen=True)
class _Weights(Scheme):
    """Quantize the weights of linear layers, and nothing else."""

    form: str
    layer: type[QuantizedLinear]

    def check(self, settings: Settings, model: nn.Module) -> None:
        pass

    def find(self, settings: Settings, program: Program) -> Iterable[Site | Refusal]:
        layers = linears(program, partial(self.objection, settings))
        return found(settings, program, layers, partial(self._instead, settings))

    def rewrite(self, settings: Settings, site: Site, edit: Edit) -> None:
        put(edit, "", self._instead(settings, edit.owner))

    def objection(self, settings: Settings, linear: Layer, weight: Tensor) -> str:
        """Return why it cannot take a layer with a weight, or ""."""
        return ""

    def group(self, settings: Settings) -> int:
        return settings.group

    def _instead(self, settings: Settings, module: nn.Module) -> Instead:
        return instead_of_linear(module, self.layer, self.form, self.group(settings))


class _Int4(_Weights):
    budget: ClassVar[float] = 0.2
    options: ClassVar[tuple[str, ...]] = ("group_size",)

    def check(self, settings: Settings, model: nn.Module) -> None:
        if settings.group_size not in _GROUPS:
            known = ", ".join(map(str, _GROUPS))
            raise UsageError(f"pass 'quantize': group_size={settings.group_size}; the int4 kernel takes {known}")

    def objection(self, settings: Settings, linear: Layer, weight: Tensor) -> str:
        inputs, outputs = linear.channels
        if inputs % settings.group_size:
            return f"its {inputs} inputs cannot be divided into groups of {settings.group_size}"
        return f"its {outputs} outputs are no multiple of {_OUTPUTS}" if outputs % _OUTPUTS else ""

    def group(self, settings: Settings) -> int:
        return settings.group_size


class _Float8(_Weights):
    budget: ClassVar[float] = 0.1

    def objection(self, settings: Settings, linear: Layer, weight: Tensor) -> str:
        if settings.aim == "speed" and not has_float8(weight.device):
            return f"it is on {weight.device.type}, {_NO_FLOAT8}"
        return ""


WEIGHT_SCHEMES: Mapping[str, Scheme] = {
    "int8_weight": _Weights("int8", Int8WeightLinear),
    "int4_weight": _Int4("int4", Int4WeightLinear),
    "float8": _Float8("float8", Float8Linear),
}
