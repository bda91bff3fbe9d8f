"""int8_dynamic: weights in int8, activations quantized at each call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from ...compat import own_parameters
from ...compat_quantized import why_no_int8
from ...errors import MatchFailure, UsageError
from ...layers.quantized import Int8DynamicLinear, Int8DynamicLSTM
from ...passes.rewriting import Edit
from ...passes.sites import Refusal, Site
from ...passes.state import QuantizeWeight, StateStep
from ...tracing.program import Program
from ...tracing.values import user_class
from .eligible import Layer, sites
from .kernels import lstm_problem
from .linears import linears
from .replacing import put, replace_linear
from .settings import Settings

__all__ = ["SCHEME"]


class _Dynamic:
    """Quantize linear layers and LSTMs, activations at each call."""

    def check(self, settings: Settings, model: nn.Module) -> None:
        reason = why_no_int8()
        if reason:
            raise UsageError(f"pass 'quantize': scheme={settings.scheme} does not run here: {reason}")

    def find(self, settings: Settings, program: Program) -> Iterable[Site | Refusal]:
        layers = linears(program, lambda linear: _elsewhere(linear.weight))
        return sites(settings, program, [*layers, *_lstms(program)])

    def rewrite(self, settings: Settings, site: Site, edit: Edit) -> None:
        group = 0 if settings.per_channel else -1
        if isinstance(edit.owner, nn.LSTM):
            _replace_lstm(edit.owner, edit, group)
        else:
            replace_linear(edit, Int8DynamicLinear, "int8", group)


SCHEME = _Dynamic()


def _elsewhere(tensor: Tensor) -> str:
    device = tensor.device.type
    return "" if device == "cpu" else f"it is on {device}, and the kernels are for CPUs"


def _lstms(program: Program) -> Iterator[Layer]:
    for module in program.names.distinct:
        if isinstance(module, nn.LSTM) and user_class(type(module)) is nn.LSTM:
            weights = _weights(module)
            objection = "its hidden state is projected, for which there is no kernel" if module.proj_size else ""
            objection = objection or _elsewhere(next(iter(weights.values())))
            detail = f"LSTM {module.input_size} to {module.hidden_size}"
            yield Layer(program.names.name(module), module, weights, detail, objection)


def _weights(lstm: nn.LSTM) -> Mapping[str, Tensor]:
    found = own_parameters(lstm).items()
    return {name: weight for name, weight in found if weight is not None and name.startswith("weight_")}


def _replace_lstm(lstm: nn.LSTM, edit: Edit, group: int) -> None:
    problem = lstm_problem(lstm, group)
    if problem:
        raise MatchFailure(problem)
    weights = _weights(lstm)
    steps: dict[StateStep, Tensor] = {
        QuantizeWeight.of(name, weight, "int8", group=group): weight for name, weight in weights.items()
    }
    put(edit, "", steps, lambda held: Int8DynamicLSTM(lstm, dict(zip(weights, held, strict=True))))
