"""int8_dynamic: weights in int8, activations quantized at each call."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ...compat_quantized import why_no_int8
from ...errors import UsageError
from ...layers.quantized import Int8DynamicLinear
from ...passes.rewriting import Edit
from ...passes.sites import Refusal, Site
from ...tracing.program import Program
from .linears import Linear, linears
from .replacing import replace_linear
from .settings import Settings

__all__ = ["SCHEME"]


class _Dynamic:
    """Quantize linear layers, activations at each call."""

    def check(self, settings: Settings, model: nn.Module) -> None:
        reason = why_no_int8()
        if reason:
            raise UsageError(f"pass 'quantize': scheme={settings.scheme} does not run here: {reason}")

    def find(self, settings: Settings, program: Program) -> Iterable[Site | Refusal]:
        return linears(settings, program, _objection)

    def rewrite(self, settings: Settings, site: Site, edit: Edit) -> None:
        replace_linear(edit, Int8DynamicLinear, "int8", 0 if settings.per_channel else -1)


SCHEME = _Dynamic()


def _objection(linear: Linear) -> str:
    device = linear.weight.device.type
    return "" if device == "cpu" else f"it is on {device}, and the kernels are for CPUs"
