"""Schemes that replace layers one by one: weights in small numbers, and activations as they are or at each call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from ...compat import own_parameters
from ...compat.quantized import has_float8, needs_reduced_range
from ...errors import CalibrationError, MatchFailure
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
from ...runtime.values import user_class
from ...tracing.program import Program, is_on_meta
from ..calibration import calls
from .find import Found, Make, found
from .kernels import lstm_problem
from .layers import Candidate, is_tied, linear_of, linears, outputs_first, weight_of
from .methods import Treatment, check_processes, treatment
from .options import Options
from .statistics import statistics
from .write import Instead, instead_of, instead_of_linear, put

__all__ = ["find", "rewrite"]

_LAYERS: Mapping[str, tuple[str, type[QuantizedLinear]]] = {
    "int8_dynamic": ("int8", Int8DynamicLinear),
    "int8_weight": ("int8", Int8WeightLinear),
    "int4_weight": ("int4", Int4WeightLinear),
    "float8": ("float8", Float8Linear),
}
"""Scheme -> how weights are held, and the layer that computes with them."""

_NO_FLOAT8 = "and float8 is fast on GPUs since Ada and Hopper only; aim=size holds its weight in float8 all the same"
_NO_VNNI = "this CPU has no VNNI: activations have 7 bits"
_OUTPUTS = 16
"""The int4 kernel takes outputs in blocks of so many."""


def find(options: Options, program: Program) -> Iterable[Site | Refusal]:
    """Yield the layers to quantize, and why others stay."""
    is_dynamic = options.scheme == "int8_dynamic"
    layers = linears(program, partial(_objection, options.levels[0]), stays=is_dynamic and options.aim == "speed")
    layers += _lstms(program) if is_dynamic else ()
    if is_dynamic and needs_reduced_range():
        layers = [replace(layer, detail=f"{layer.detail}; {_NO_VNNI}") for layer in layers]
    return found(program, layers, {level: partial(_prepared, level, program) for level in options.levels})


def _prepared(options: Options, program: Program, layers: Sequence[Candidate]) -> Make:
    """Return what makes the layers that stand in the place of these, once data have told what is best for each."""
    calibrates = options.calibrates and not program.replaying
    treated = _treated(options, program, layers) if calibrates else {}

    def make(module: nn.Module) -> Instead:
        linear = linear_of(module)
        objection = "" if linear is None else _objection(options, linear, weight_of(module))
        if not objection and calibrates and linear is not None and module not in treated:
            objection = "the calibration data never reaches it"
        if objection:
            raise MatchFailure(objection)
        return _instead(options, program, module, treated.get(module, Treatment()))

    return make


def _treated(options: Options, program: Program, layers: Sequence[Candidate]) -> dict[nn.Module, Treatment]:
    check_processes(options)
    if is_on_meta(program.model):
        raise CalibrationError("the model is on the meta device; load its weights, then calibrate")
    form, _ = _LAYERS[options.scheme]
    linear_layers = {layer.name: each for layer in layers if (each := linear_of(layer.module)) is not None}
    modules = {layer.name: layer.module for layer in layers if layer.name in linear_layers}
    inputs = {name: linear.channels[0] for name, linear in linear_layers.items()}
    data = calls(options.calibration, options.batches, program, f"method={options.method}")
    found: dict[nn.Module, Treatment] = {}
    for part in statistics(program, modules, inputs, data, options.method == "gptq"):
        for name, seen in part.items():
            linear, weight = linear_layers[name], weight_of(modules[name])
            if not _objection(options, linear, weight):
                found[modules[name]] = treatment(options, form, outputs_first(modules[name], weight), seen)
    return found


def rewrite(options: Options, site: Site, edit: Edit) -> None:
    """Rewrite one site, or raise `MatchFailure`."""
    level = next((each for each in options.levels if each.scheme == site.data.get("scheme", options.scheme)), options)
    found, linear = Treatment(), linear_of(edit.owner)
    if linear is not None and site.data:
        weight = outputs_first(edit.owner, weight_of(edit.owner))
        made = site.found.weight if isinstance(site.found, Found) else None
        found = Treatment.from_plan(site.data, _LAYERS[level.scheme][0], level.group, weight, made)
    put(edit, "", _instead(level, edit.program, edit.owner, found))


def _objection(options: Options, linear: Layer, weight: Tensor) -> str:
    """Return why a scheme cannot take a layer with a weight, or ""."""
    inputs, outputs = linear.channels
    match options.scheme:
        case "int8_dynamic":
            return _elsewhere(weight)
        case "int4_weight" if inputs % options.group_size:
            return f"its number of inputs, {inputs}, cannot be divided into groups of {options.group_size}"
        case "int4_weight" if outputs % _OUTPUTS:
            return f"its number of outputs, {outputs}, is no multiple of {_OUTPUTS}"
        case "float8" if options.aim == "speed" and not has_float8(weight.device):
            return f"it is on {weight.device.type}, {_NO_FLOAT8}"
        case _:
            return ""


def _instead(options: Options, program: Program, module: nn.Module, found: Treatment) -> Instead:
    """Return what stands in the place of a layer, or raise `MatchFailure`."""
    is_dynamic = options.scheme == "int8_dynamic"
    if is_dynamic and isinstance(module, nn.LSTM):
        return _instead_of_lstm(module, options.group)
    form, layer = _LAYERS[options.scheme]
    stays = is_dynamic and is_tied(module, program)
    return instead_of_linear(module, layer, form, options.group, found, stays=stays)


def _elsewhere(tensor: Tensor) -> str:
    device = tensor.device.type
    return "" if device == "cpu" else f"it is on {device}, and the kernels are for CPUs"


def _lstms(program: Program) -> Iterator[Candidate]:
    for module in program.names.distinct:
        if isinstance(module, nn.LSTM) and user_class(type(module)) is nn.LSTM:
            weights = _weights(module)
            reason = "its hidden state is projected, for which there is no kernel" if module.proj_size else ""
            reason = reason or _elsewhere(next(iter(weights.values())))
            detail = f"LSTM {module.input_size} to {module.hidden_size}"
            yield Candidate(program.names.name(module), module, weights, detail, reason)


def _weights(lstm: nn.LSTM) -> Mapping[str, Tensor]:
    found = own_parameters(lstm).items()
    return {name: weight for name, weight in found if weight is not None and name.startswith("weight_")}


def _instead_of_lstm(lstm: nn.LSTM, group: int) -> Instead:
    reason = lstm_problem(lstm, group)
    if reason:
        raise MatchFailure(reason)
    weights = _weights(lstm)
    steps: dict[StateStep, Tensor] = {
        QuantizeWeight.of(name, weight, "int8", group=group): weight for name, weight in weights.items()
    }
    return instead_of(steps, lambda held: Int8DynamicLSTM(lstm, dict(zip(weights, held, strict=True))))
