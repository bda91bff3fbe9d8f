"""int8_dynamic: weights in int8, activations quantized at each call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from torch import Tensor, nn

from ...compat import own_parameters
from ...compat.quantized import why_no_int8
from ...errors import MatchFailure, UsageError
from ...layers.quantized import Int8DynamicLinear, Int8DynamicLSTM
from ...passes.rewriting import Edit
from ...passes.sites import Refusal, Site
from ...runtime.state import QuantizeWeight, StateStep
from ...runtime.values import qualified, user_class
from ...tracing.program import Program
from .find import found
from .kernels import lstm_problem
from .layers import Candidate, linears, tied_to
from .schemes import Scheme, Settings
from .write import Instead, instead_of, instead_of_linear, put

__all__ = ["Dynamic"]


class Dynamic(Scheme):
    """Quantize linear layers and LSTMs, activations at each call."""

    def check(self, settings: Settings, model: nn.Module) -> None:
        reason = why_no_int8()
        if reason:
            raise UsageError(f"pass 'quantize': scheme={settings.scheme} does not run here: {reason}")

    def find(self, settings: Settings, program: Program) -> Iterable[Site | Refusal]:
        stays = settings.aim == "speed"
        layers = linears(program, lambda _, weight: _elsewhere(weight), stays=stays)
        return found(settings, program, [*layers, *_lstms(program)], partial(_instead, settings, program))

    def rewrite(self, settings: Settings, site: Site, edit: Edit) -> None:
        put(edit, "", _instead(settings, edit.program, edit.owner))


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


def _instead(settings: Settings, program: Program, module: nn.Module) -> Instead:
    if isinstance(module, nn.LSTM):
        return _instead_of_lstm(module, settings.group)
    tied = tied_to(qualified(program.names.name(module), "weight"), program)
    return instead_of_linear(module, Int8DynamicLinear, "int8", settings.group, stays=bool(tied))


def _instead_of_lstm(lstm: nn.LSTM, group: int) -> Instead:
    problem = lstm_problem(lstm, group)
    if problem:
        raise MatchFailure(problem)
    weights = _weights(lstm)
    steps: dict[StateStep, Tensor] = {
        QuantizeWeight.of(name, weight, "int8", group=group): weight for name, weight in weights.items()
    }
    return instead_of(steps, lambda held: Int8DynamicLSTM(lstm, dict(zip(weights, held, strict=True))))
