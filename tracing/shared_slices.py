"""Slices of stacked tensors, cut once for all of a call in which members of an ensemble run one by one."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import is_plainly_eager, version_of

__all__ = ["SharedSlices", "shared_slice", "sharing", "unshared"]


@dataclass(slots=True)
class _Cut:
    """The slices of a parameter along dimension 0.

    Attributes:
        stacked: the parameter.
        version: how often it had been changed.
        address: where its memory was.
        tracked: whether gradients flow from the slices.
        slices: all of them.
    """

    stacked: Tensor
    version: int
    address: int
    tracked: bool
    slices: tuple[Tensor, ...]

    def is_still_there(self) -> bool:
        """Say whether slices that nothing flows from can be given out again: they are where the parameter is."""
        return self.address == self.stacked.data_ptr() and self.stacked.grad is None


class SharedSlices:
    """Let members of an ensemble that run one by one share what was cut of their stacked parameters.

    With gradients these are cut anew in each call; autograd then has one node, not one for each member, whose backward
    would fill a tensor of the size of all. Without, they are kept from call to call; copies keep nothing.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], _Cut] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedSlices, ()

    @contextmanager
    def during_call(self) -> Generator[None]:
        """Share among all that read members inside, in this thread."""
        if sharing.call is not None or torch.compiler.is_compiling() or not is_plainly_eager():
            yield
            return
        sharing.call = _SharingCall(self._kept)
        try:
            yield
        finally:
            sharing.call = None


class _SharingCall:
    """What was cut so far in a call, by `id` of the parameter.

    Args:
        kept: what was cut in earlier calls without gradients, by `id` of the module that holds it, and name.
    """

    def __init__(self, kept: dict[tuple[int, str], _Cut]) -> None:
        self.cuts: dict[int, _Cut] = {}
        self._kept = kept

    def cut(self, stacked: Tensor, place: tuple[int, str]) -> _Cut:
        """Return the slices of a parameter, as they are to be had now."""
        tracked = torch.is_grad_enabled()
        plain = not tracked and type(stacked) is nn.Parameter
        cut = self._kept.get(place) if plain else None
        if cut is not None and cut.stacked is stacked and cut.is_still_there():
            cut.version = version_of(stacked)
        else:
            slices = (stacked.detach() if plain else stacked).unbind(0)
            cut = _Cut(stacked, version_of(stacked), stacked.data_ptr() if plain else 0, tracked, slices)
            if stacked.grad is not None:
                for member, gradient in zip(slices, stacked.grad.unbind(0), strict=True):
                    member.grad = gradient
            elif plain:
                self._kept[place] = cut
        self.cuts[id(stacked)] = cut
        return cut


class _Local(threading.local):
    call: _SharingCall | None = None


sharing = _Local()
"""The call of this thread that members share slices in; None outside of one."""


@contextmanager
def unshared() -> Generator[None]:
    """Let nothing be shared for a while: what is traced, or runs on stand-ins, is no part of the call."""
    outer, sharing.call = sharing.call, None
    try:
        yield
    finally:
        sharing.call = outer


def shared_slice(call: _SharingCall, store: nn.Module, name: str, position: int) -> Tensor | None:
    """Return a slice of the parameter `name` of `store`, cut for all members at once; None of what is no parameter."""
    stacked: Tensor | None = store.__dict__["_parameters"].get(name)
    if stacked is None or stacked.is_inference():  # such a tensor does not count its changes
        return None
    cut = call.cuts.get(id(stacked))
    if cut is None or cut.version != version_of(stacked) or not (cut.tracked or not torch.is_grad_enabled()):
        cut = call.cut(stacked, (id(store), name))
    return cut.slices[position]
