"""Measure what memory a model's activations take: after a forward, and at the worst moment of a step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...compat import DispatchMode, storage_id
from ...runtime.values import flatten, map_tensors, requires_grad, tensors_in
from ...tracing.examples import Inputs
from ...tracing.isolation import preserved

__all__ = ["LiveBytes", "MemoryUse", "call_bytes", "memory_use"]


class LiveBytes(DispatchMode):
    """Count bytes of tensors alive `now` and at the `peak` while this is on; operators' own scratch is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def expect(self, value: Any) -> None:
        """Leave out of the count what is there already."""
        self._known.update(_storage(tensor) for tensor in tensors_in(value))

    def bytes_in(self, value: Any) -> int:
        """Return the bytes of the counted memory that a value holds."""
        held = {_storage(tensor): tensor for tensor in tensors_in(value)}
        return sum(tensor.untyped_storage().nbytes() for number, tensor in held.items() if number in self._known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage(tensor) for tensor in tensors_in((args, kwargs or {}))}
        for tensor in tensors_in(result):
            if _storage(tensor) not in given:
                self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        key = _storage(tensor)
        if key in self._known or key < 0:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key, size).atexit = False

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _storage(tensor: Tensor) -> int:
    try:
        return storage_id(tensor)
    except NotImplementedError:
        return -1


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that a training step takes beside parameters, inputs and results: after the forward, and at the worst."""

    live: int
    peak: int


def memory_use(model: nn.Module, calls: Sequence[Inputs]) -> MemoryUse:
    """Return what the largest of some calls, with its backward, takes."""
    with preserved(model), torch.enable_grad():
        uses = [_use_of(model, call) for call in calls]
    return max(uses, key=lambda use: use.peak)


def call_bytes(model: nn.Module, calls: Sequence[Inputs]) -> int:
    """Return the bytes that the largest of some calls takes at most beside parameters and inputs, without gradients."""
    peaks = [0]
    with preserved(model), torch.no_grad():
        for call in calls:
            args, kwargs = map_tensors(torch.clone, (call.args, call.kwargs))
            with LiveBytes() as live:
                live.expect((list(model.parameters()), list(model.buffers()), args, kwargs))
                model(*args, **kwargs)
            peaks.append(live.peak)
    return max(peaks)


def _use_of(model: nn.Module, call: Inputs) -> MemoryUse:
    args, kwargs = map_tensors(torch.clone, (call.args, call.kwargs))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with LiveBytes() as live:
        live.expect((list(model.parameters()), list(model.buffers()), args, kwargs))
        outputs = [value for value in flatten(model(*args, **kwargs)).values() if requires_grad(value)]
        alive = live.now - live.bytes_in(outputs)
        upstream = [torch.ones_like(output) for output in outputs]
        if outputs and parameters:
            torch.autograd.grad(outputs, parameters, upstream, allow_unused=True)
    return MemoryUse(alive, live.peak)
