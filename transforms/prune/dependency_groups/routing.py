"""Which experts a model's tokens go to, seen in a run: what is chosen by `topk`, in which modules, and how often."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ....tracing.isolation import in_phase, preserved
from ....tracing.program import Program
from ....tracing.recording import calls_intercepted, copy_inputs

__all__ = ["Choices", "Routing", "choices_of"]


@dataclasses.dataclass(frozen=True)
class Routing:
    """What a module chooses from: how many are chosen at once, at the most, and how often each was [size]."""

    most: int
    counts: Tensor


@dataclasses.dataclass
class Choices:
    """What was chosen in which modules, those around them included: module -> what it chooses from, by size; and how
    many features the linear layers give that are computed in it.
    """

    routings: dict[str, dict[int, Routing]] = dataclasses.field(default_factory=dict[str, dict[int, Routing]])
    linears: dict[str, set[int]] = dataclasses.field(default_factory=dict[str, set[int]])

    def chosen(self, modules: Iterable[str], size: int, indices: Tensor) -> None:
        """Note that some of `size` were chosen: `indices` [..., k]."""
        counts = indices.detach().flatten().bincount(minlength=size).cpu()
        for module in modules:
            of = self.routings.setdefault(module, {})
            known = of.get(size, Routing(0, torch.zeros_like(counts)))
            of[size] = Routing(max(known.most, indices.shape[-1]), known.counts + counts)


def choices_of(program: Program, run: Callable[[nn.Module], None] | None = None) -> Choices:
    """Return what a program's modules choose while it runs, on its example inputs or as `run` runs the model."""
    watch = _Watch(program)
    with ExitStack() as stack:
        for context in (preserved(program.model), in_phase(program.model, False), torch.no_grad()):
            stack.enter_context(context)
        stack.enter_context(calls_intercepted(watch.call))
        stack.enter_context(watch)
        if run is not None:
            run(program.model)
        else:
            for call in program.whole_calls:
                copy_inputs(call).run(program.model)
    return watch.choices


class _Watch(TorchFunctionMode):
    """Note what is chosen, and where the run is."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.choices = Choices()
        self._names = program.names
        self._inside: list[str] = []

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._inside.append(self._names.name(module) if module in self._names else "")
        try:
            return original(module, *args, **kwargs)
        finally:
            self._inside.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in (torch.topk, Tensor.topk):
            given = args[2] if len(args) > 2 else kwargs.get("dim", -1)
            if given in (-1, result[1].dim() - 1):
                self.choices.chosen(dict.fromkeys(self._inside), args[0].shape[-1], result[1])
        elif func is F.linear:
            for module in self._inside:
                self.choices.linears.setdefault(module, set()).add(result.shape[-1])
        return result
