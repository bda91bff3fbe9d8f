"""The linear layers of a model: which can be quantized, and why others stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...compat import has_hooks, has_state_hooks, own_parameters
from ...passes.contract import names_module
from ...passes.sites import Refusal, Site
from ...passes.verification import TensorOwners, TensorReads
from ...tracing.program import Program
from ...tracing.values import qualified, user_class
from .settings import Settings

__all__ = ["Linear", "is_kept", "linear_of", "linears", "obstacle", "value_problem"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Objection = Callable[["Linear"], str]
"""Says why a scheme cannot take a layer, or ""."""


@dataclass(frozen=True)
class Linear:
    """A linear layer, however it is spelled.

    Attributes:
        module: the layer.
        weight: its weight.
        bias: its bias, or None.
        dim: which dimension of the weight is that of outputs.
    """

    module: nn.Module
    weight: nn.Parameter
    bias: nn.Parameter | None
    dim: int

    @property
    def inputs(self) -> int:
        return self.weight.shape[1 - self.dim]

    @property
    def outputs(self) -> int:
        return self.weight.shape[self.dim]


def linear_of(module: nn.Module) -> Linear | None:
    """Return a module as a linear layer, or None: `nn.Linear` itself, or the `Conv1D` of transformers."""
    kind = user_class(type(module))
    is_transposed = kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
    weight = own_parameters(module).get("weight")
    if (kind is not nn.Linear and not is_transposed) or weight is None or weight.ndim != 2:
        return None
    return Linear(module, weight, own_parameters(module).get("bias"), int(is_transposed))


def linears(settings: Settings, program: Program, objection: Objection) -> Iterator[Site | Refusal]:
    """Yield a site for each linear layer, the largest first, and why others stay as they are.

    So what one time budget allows is spent where the most is gained.
    """
    found = [(name, linear) for name, module in _modules(program) if (linear := linear_of(module)) is not None]
    found.sort(key=lambda pair: -pair[1].weight.numel())
    called = _called(program, [linear.module for _, linear in found])
    for name, linear in found:
        if is_kept(settings.keep, name, program):
            continue
        reason = obstacle(name, linear.module, linear.weight, program) or objection(linear)
        if not reason and called is not None and linear.module not in called:
            reason = "the example inputs never call it"
        if reason:
            yield Refusal(reason, name or "(root)")
        else:
            yield Site(program, name, {}, detail=f"{linear.inputs} to {linear.outputs}")


def value_problem(name: str, tensor: Tensor) -> str:
    """Return what keeps a weight from being quantized, or ""."""
    if tensor.dtype not in _DTYPES:
        return f"{name} is of {str(tensor.dtype).removeprefix('torch.')}; convert it to float32, bfloat16 or float16"
    if tensor.layout is not torch.strided or type(tensor) not in (Tensor, nn.Parameter):
        return f"{name} is a {type(tensor).__name__} ({tensor.layout}), and no plain tensor"
    if not tensor.numel():
        return f"{name} is empty"
    return "" if tensor.is_meta or tensor.isfinite().all() else f"{name} has elements that are not finite"


def is_kept(words: Sequence[str], name: str, program: Program) -> bool:
    """Say whether words name a module, or one around it."""
    parts = name.split(".")
    around = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return any(names_module(word, path, program.module(path)) for path in around for word in words)


def _modules(program: Program) -> Iterator[tuple[str, nn.Module]]:
    for module in program.names.distinct:
        yield program.names.name(module), module


def _called(program: Program, modules: list[nn.Module]) -> set[nn.Module] | None:
    """Return those of the modules that the example inputs call, or None where there are none."""
    if not program.inputs or program.replaying:
        return None
    return {module for module in modules if program.recording(modules).calls.get(module)}


def obstacle(name: str, module: nn.Module, weight: nn.Parameter, program: Program) -> str:
    """Return why a layer with a weight must stay as it is, or ""."""
    path = qualified(name, "weight")
    if not name:
        return "the whole model is this layer, and nothing can be put in its place"
    if has_hooks(module) or has_state_hooks(module):
        return "it has hooks, which the layer in its place would not have"
    tied = [other for other in program.analyses[TensorOwners].names(path) if other != path]
    if tied:
        return f"its weight is tied to '{tied[0]}'"
    reader = program.analyses[TensorReads].reader(weight)
    if reader is not None and reader != name:
        return f"'{reader}' reads its weight"
    return value_problem(f"'{path}'", cast("Any", weight))
