"""One call of a module as it happens in use, to be timed: a forward, or a forward and its backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ...compat import version_of
from ...runtime.values import Arguments, flatten, map_tensors, requires_grad, state_of
from ...tracing.examples import Inputs
from ...tracing.isolation import preserved
from .conditions import one_thread

__all__ = ["Runner", "forward_seconds"]

_WITH_BACKWARD = 3.0
"""A forward and its backward take three times as long as a forward alone: two more products for each."""
_MAY_BE_COLD = 50e-3
"""A forward that is done sooner is made twice to learn what it takes: the first one waits for memory and threads."""


def forward_seconds(
    module: nn.Module, calls: Sequence[Inputs], training: bool, clock: Callable[[], float] = time.thread_time
) -> float:
    """Return what running a module on its calls takes, roughly: from one run, and without its backward."""
    with preserved(module), torch.set_grad_enabled(training):
        start = clock()
        for call in calls:
            module(*map_tensors(torch.clone, call.args), **map_tensors(torch.clone, call.kwargs))
        return (clock() - start) * (_WITH_BACKWARD if training else 1.0)


class Runner:
    """Make the recorded calls of a module, all of them each time; that takes about so many `seconds` of processor time.

    In training a call ends when gradients of its outputs times fixed random numbers have arrived; none is accumulated.
    Float arguments have theirs if `input_gradients` or, for None, where they require them. It waits for its `gpus`.
    Of a module inside a model that is `given` some tensors, other whole numbers are new ones in each call: what a layer
    keeps for an index that the model computes serves one call.
    """

    def __init__(
        self, module: nn.Module, calls: Sequence[Inputs], *, training: bool, input_gradients: bool | None = None,
        given: Sequence[Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.module, self.training = module, training
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        with self.leaving_no_trace():
            self._calls = [_Call(module, call, training, input_gradients, parameters, given) for call in calls]
        self.seconds = sum(call.seconds for call in self._calls) * (_WITH_BACKWARD if training else 1.0)
        tensors = (
            *module.parameters(),
            *module.buffers(),
            *flatten([(call.args, call.kwargs) for call in calls]).values(),
        )
        self.gpus = {tensor.device for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_cuda}

    def __call__(self) -> None:
        with torch.set_grad_enabled(self.training):
            for call in self._calls:
                call()
        for gpu in self.gpus:
            torch.cuda.synchronize(gpu)

    def seconds_in_one_thread(self) -> float:
        """Return the processor time of one run in one thread: on a busy machine it is mostly waiting in more."""
        with self.leaving_no_trace(), one_thread():
            start = time.thread_time()
            self()
            return time.thread_time() - start

    def leaving_no_trace(self) -> AbstractContextManager[None]:
        """Return a context that puts back what calls change: buffers, attributes, random state."""
        return preserved(self.module)


class _Call:
    """One call, and its backward where there is one."""

    def __init__(
        self,
        module: nn.Module,
        call: Inputs,
        training: bool,
        input_gradients: bool | None,
        parameters: Sequence[Tensor],
        given: Sequence[Tensor] | None,
    ) -> None:
        self.module = module

        def argument(tensor: Tensor) -> Tensor:
            wanted = tensor.requires_grad if input_gradients is None else tensor.dtype.is_floating_point
            return tensor.detach().clone().requires_grad_(training and wanted)

        self.arguments: Arguments = map_tensors(argument, (call.args, call.kwargs))
        values = flatten(self.arguments).values()
        self.wanted = [*parameters, *filter(requires_grad, values)] if training else []
        self.new = set[int]() if given is None else {id(each) for each in values if _is_computed(each, given)}
        """Arguments, by identity, that are other tensors in each call."""
        self._run_first(training)
        self.seconds = min(self.seconds, self._seconds_again(training))

    def __call__(self) -> None:
        losses = self._losses()
        if losses and self.wanted:
            torch.autograd.grad(losses, self.wanted, allow_unused=True)

    def _forward(self) -> Mapping[str, Any]:
        args, kwargs = map_tensors(self._given, self.arguments) if self.copies or self.new else self.arguments
        return flatten(self.module(*args, **kwargs))

    def _given(self, tensor: Tensor) -> Tensor:
        return tensor.clone() if self.copies or id(tensor) in self.new else tensor

    def _run_first(self, training: bool) -> None:
        """Learn what a run takes, which outputs give gradients, and whether it needs copies of what it changes."""
        args, kwargs = map_tensors(torch.clone, self.arguments)
        given = [leaf for leaf in flatten([args, kwargs]).values() if isinstance(leaf, Tensor)]
        before = [version_of(tensor) for tensor in given]
        state = state_of([args, kwargs])
        start = time.thread_time()
        with torch.set_grad_enabled(training):
            outputs = flatten(self.module(*args, **kwargs))
        self.seconds = time.thread_time() - start
        self.upstream = self._upstream(outputs)
        self.copies = [version_of(tensor) for tensor in given] != before or state_of([args, kwargs]) != state

    def _seconds_again(self, training: bool) -> float:
        if self.seconds > _MAY_BE_COLD:
            return self.seconds
        start = time.thread_time()
        with torch.set_grad_enabled(training):
            self._forward()
        return time.thread_time() - start

    def _upstream(self, outputs: Mapping[str, Any]) -> dict[str, Tensor]:
        if not self.wanted:
            return {}
        generator = torch.Generator().manual_seed(0)
        return {
            name: torch.randn(value.shape, generator=generator).to(device=value.device, dtype=value.dtype)
            for name, value in outputs.items()
            if requires_grad(value)
        }

    def _losses(self) -> list[Tensor]:
        outputs = self._forward()
        return [(outputs[name] * upstream).real.sum() for name, upstream in self.upstream.items()]


def _is_computed(value: Any, given: Sequence[Tensor]) -> bool:
    """Say whether an argument is whole numbers that are none of those given to the model around."""
    if type(value) is not Tensor or value.is_floating_point() or value.is_complex():
        return False
    alike = [each for each in given if type(each) is Tensor and _form(each) == _form(value)]
    return value.layout is torch.strided and not any(torch.equal(each, value) for each in alike)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.device, tensor.layout
