"""What came out of one run of a module: results, gradients, what was changed, and which memory results lie in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .float64 import Table

__all__ = [
    "GRADIENT", "Gradients", "Outcome", "Quantities", "differentiable", "is_expanded", "is_gradient", "shared_memory",
]  # fmt: skip

Gradients = dict[str, Tensor | None]

Quantities = dict[str, Any]
"""Everything one run yields, by a label that a message can show: "output[0]", "gradient of weight", "buffer mean"."""

GRADIENT = "gradient of "


@dataclass(frozen=True)
class Outcome:
    """What one module did on one call; every part is keyed by a name that a message can show."""

    structure: tuple[tuple[str, str], ...]  # every path in the result, and the type there
    outputs: dict[str, Any]  # the leaves of the result, tensors detached
    attached: frozenset[str]  # the outputs that gradients flow from
    inputs: dict[str, Tensor]  # the arguments that the call changed in place, as it left them
    input_gradients: Gradients  # one per float argument; None where none arrived
    parameter_gradients: Gradients  # one per parameter; None where none arrived or none is wanted
    buffers: dict[str, Tensor]  # as the call left them
    shared: frozenset[tuple[str, str]]  # (output, owner of memory that it lies in); see `shared_memory`
    # the plain attributes that the call wrote into: they are no state, and keep what is written
    rewritten: frozenset[str]
    random_state: Tensor  # of the CPU generator after the forward
    expanded: frozenset[str] = frozenset()  # the outputs whose elements share memory
    missed: bool = False  # whether a module ran its own code, since none of its graphs fitted
    left: frozenset[str] = frozenset()  # the switches of torch that the call left otherwise
    # the integer arguments that pick from tables, and the shortest of these
    tables: Mapping[str, Table] = field(default_factory=dict[str, Table])

    def quantities(
        self, parameter_gradients: Mapping[str, Any] | None = None, buffers: Mapping[str, Any] | None = None
    ) -> Quantities:
        """Return what the run yielded as one flat dictionary; gradients and buffers may go by other names."""
        gradients = self.parameter_gradients if parameter_gradients is None else parameter_gradients
        left = self.buffers if buffers is None else buffers
        return {
            **{name: _as_tensor(value) for name, value in self.outputs.items()},
            **{f"{name} after the call": tensor for name, tensor in self.inputs.items()},
            **{f"{GRADIENT}{name}": gradient for name, gradient in self.input_gradients.items()},
            **{f"{GRADIENT}{name}": gradient for name, gradient in gradients.items()},
            **{f"buffer {name}": tensor for name, tensor in left.items()},
        }

    def is_zero(self) -> bool:
        """Say whether all gradients are zero."""
        return not any(bool(gradient.any()) for gradient in self._gradients if gradient is not None)

    def is_finite(self) -> bool:
        """Say whether results and gradients are finite."""
        return _are_finite((*self.outputs.values(), *self._gradients))

    def is_finite_in_value(self) -> bool:
        """Say whether the results are finite."""
        return _are_finite(self.outputs.values())

    @property
    def _gradients(self) -> tuple[Tensor | None, ...]:
        return (*self.input_gradients.values(), *self.parameter_gradients.values())


def is_gradient(label: str) -> bool:
    """Say whether a label of `Quantities` names a gradient."""
    return label.startswith(GRADIENT)


def differentiable(tensor: Tensor) -> bool:
    """Say whether gradients can flow to `tensor`, judged by its type."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def is_expanded(tensor: Tensor) -> bool:
    """Say whether elements of a tensor share memory, so that torch refuses to write into it."""
    steps = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else ()
    return any(size > 1 and step == 0 for size, step in steps)


def shared_memory(
    outputs: Mapping[str, object], arguments: Mapping[str, Tensor], own: Iterable[Tensor]
) -> frozenset[tuple[str, str]]:
    """Return (output, owner) for each output in the memory of an argument, of the module, or of an earlier output.
    Those that lie side by side in one piece of memory (parts of a batched product) do not share it.
    """
    owners = {_memory(tensor): name for name, tensor in arguments.items()}
    owners.update((_memory(tensor), "the module's own tensors") for tensor in own)
    owners.pop(None, None)
    starts: dict[int, str] = {}
    shared: set[tuple[str, str]] = set()
    for name, value in outputs.items():
        memory = _memory(value) if isinstance(value, Tensor) else None
        if memory is None or not isinstance(value, Tensor):
            continue
        if memory in owners:
            shared.add((name, owners[memory]))
        first = starts.setdefault(value.data_ptr(), name)
        if first is not name:
            shared.add((name, first))
    return frozenset(shared)


def _memory(tensor: Tensor) -> int | None:
    """Return where the memory of a tensor begins; None where it has none of its own."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except RuntimeError:  # it is made of other tensors, as quantized ones are
        return None


def _as_tensor(value: Any) -> Any:
    """Return a Python float as a tensor: it was rounded like one."""
    return torch.tensor(value, dtype=torch.float64) if type(value) is float else value


def _are_finite(values: Iterable[object]) -> bool:
    floats = (value for value in values if isinstance(value, Tensor) and value.is_floating_point())
    return all(math.isfinite(value.sum()) for value in floats)
