"""Schemes that replace layers one by one: weights in small numbers, and activations as they are or at each call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from ...compat import own_parameters
from ...compat.quantized import has_float8, why_no_int8
from ...errors import MatchFailure, UsageError
from ...layers.quantized import (
    Float8Linear,
    Int4WeightLinear,
    Int8DynamicLinear,
    Int8DynamicLSTM,
    Int8WeightLinear,
    QuantizedLinear,
)
from ...passes.rewriting import Edit, Layer
from ...passes.sites import Refusal, Site
from ...runtime.state import QuantizeWeight, StateStep
from ...runtime.values import qualified, user_class
from ...tracing.program import Program
from .find import found
from .kernels import lstm_problem
from .layers import Candidate, linears, tied_to
from .schemes import Scheme, Settings
from .write import Instead, instead_of, instead_of_linear, put

__all__ = ["LAYER_SCHEMES"]

_GROUPS = (32, 64, 128, 256)
_NO_FLOAT8 = "and float8 is fast on GPUs since Ada and Hopper only; aim=size holds its weight in float8 all the same"
_OUTPUTS = 16
"""The int4 kernel takes outputs in blocks of so many."""


class _Layerwise(Scheme):
    def find(self, settings: Settings, program: Program) -> Iterable[Site | Refusal]:
        return found(settings, program, self.layers(settings, program), partial(self.instead, settings, program))

    def rewrite(self, settings: Settings, site: Site, edit: Edit) -> None:
        put(edit, "", self.instead(settings, edit.program, edit.owner))

    @abstractmethod
    def layers(self, settings: Settings, program: Program) -> Sequence[Candidate]:
        """Return the layers that it knows, and why it cannot take some."""

    @abstractmethod
    def instead(self, settings: Settings, program: Program, module: nn.Module) -> Instead:
        """Return what stands in the place of a layer, or raise `MatchFailure`."""


class _Dynamic(_Layerwise):
    """int8_dynamic: linear layers and LSTMs, activations quantized at each call."""

    def check(self, settings: Settings, model: nn.Module) -> None:
        reason = why_no_int8()
        if reason:
            raise UsageError(f"pass 'quantize': scheme={settings.scheme} does not run here: {reason}")

    def layers(self, settings: Settings, program: Program) -> Sequence[Candidate]:
        stays = settings.aim == "speed"
        return [*linears(program, lambda _, weight: _elsewhere(weight), stays=stays), *_lstms(program)]

    def instead(self, settings: Settings, program: Program, module: nn.Module) -> Instead:
        if isinstance(module, nn.LSTM):
            return _instead_of_lstm(module, settings.group)
        tied = tied_to(qualified(program.names.name(module), "weight"), program)
        return instead_of_linear(module, Int8DynamicLinear, "int8", settings.group, stays=bool(tied))


def _elsewhere(tensor: Tensor) -> str:
    device = tensor.device.type
    return "" if device == "cpu" else f"it is on {device}, and the kernels are for CPUs"


def _lstms(program: Program) -> Iterator[Candidate]:
    for module in program.names.distinct:
        if isinstance(module, nn.LSTM) and user_class(type(module)) is nn.LSTM:
            weights = _weights(module)
            objection = "its hidden state is projected, for which there is no kernel" if module.proj_size else ""
            objection = objection or _elsewhere(next(iter(weights.values())))
            detail = f"LSTM {module.input_size} to {module.hidden_size}"
            yield Candidate(program.names.name(module), module, weights, detail, objection)


def _weights(lstm: nn.LSTM) -> Mapping[str, Tensor]:
    found = own_parameters(lstm).items()
    return {name: weight for name, weight in found if weight is not None and name.startswith("weight_")}


def _instead_of_lstm(lstm: nn.LSTM, group: int) -> Instead:
    problem = lstm_problem(lstm, group)
    if problem:
        raise MatchFailure(problem)
    weights = _weights(lstm)
    steps: dict[StateStep, Tensor] = {
        QuantizeWeight.of(name, weight, "int8", group=group): weight for name, weight in weights.items()
    }
    return instead_of(steps, lambda held: Int8DynamicLSTM(lstm, dict(zip(weights, held, strict=True))))


@dataclass(frozen=True)
class _Weights(_Layerwise):
    """Quantize the weights of linear layers, and nothing else."""

    form: str
    layer: type[QuantizedLinear]

    def layers(self, settings: Settings, program: Program) -> Sequence[Candidate]:
        return linears(program, partial(self.objection, settings))

    def instead(self, settings: Settings, program: Program, module: nn.Module) -> Instead:
        return instead_of_linear(module, self.layer, self.form, self.group(settings))

    def objection(self, settings: Settings, linear: Layer, weight: Tensor) -> str:
        """Return why it cannot take a layer with a weight, or ""."""
        return ""

    def group(self, settings: Settings) -> int:
        return settings.group


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


LAYER_SCHEMES: Mapping[str, Scheme] = {
    "int8_dynamic": _Dynamic(),
    "int8_weight": _Weights("int8", Int8WeightLinear),
    "int4_weight": _Int4("int4", Int4WeightLinear),
    "float8": _Float8("float8", Float8Linear),
}
