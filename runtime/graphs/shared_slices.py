"""Slices of stacked tensors, cut once for all of a call in which members of an ensemble run one by one."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...compat import is_plainly_eager, own_parameters, version_of

__all__ = ["MEMBERS", "SharedSlices", "by_member", "sharing"]

MEMBERS = "_fxopt_members"
"""Where a module that holds vectors of several members behind one another says of how many: name -> number."""


def by_member(store: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor with the members along dimension 0: `name` of `store`, its gradient, or another like it."""
    count: int | None = store.__dict__.get(MEMBERS, {}).get(name)
    return tensor if count is None else tensor.view(count, tensor.numel() // count)


@dataclass(slots=True)
class _Cut:
    """The slices of a parameter along dimension 0, with what tells whether they are still right."""

    store: nn.Module
    registry: dict[str, nn.Parameter | None]
    name: str
    stacked: Tensor
    version: int
    address: int
    tracked: bool
    slices: tuple[Tensor, ...]

    def is_still_there(self) -> bool:
        """Say whether the slices can be given out in another call."""
        stacked, first = self.stacked, self.slices[0]
        same = self.registry.get(self.name) is stacked and self.address == stacked.data_ptr() and stacked.grad is None
        # Autograd follows no change in place from the whole to slices that were cut before.
        linked = not self.tracked or (
            self.version == version_of(stacked) and stacked.requires_grad == first.requires_grad
        )
        return (
            same
            and linked
            and stacked.dtype is first.dtype
            and by_member(self.store, self.name, stacked).shape[1:] == first.shape
        )


_Kept = dict[tuple[int, str, bool], _Cut]
"""By the `id` of the module that holds the parameter, name, and whether gradients flow from the slices."""


class SharedSlices:
    """Let members of an ensemble that run one by one share what was cut of their stacked parameters: one node of
    autograd instead of one that fills a whole tensor for each member. Slices are kept while the parameter is the same
    and has no gradient; copies keep nothing.
    """

    def __init__(self) -> None:
        self._kept: _Kept = {}

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
    """What was cut so far in a call, by the module that holds the parameter, and name; `kept` is from earlier calls.
    Who reads a cut makes sure that `stacked` is in the `registry` at that `version`, and is `tracked` if need be.
    """

    def __init__(self, kept: _Kept) -> None:
        self.cuts: dict[nn.Module, dict[str, _Cut]] = {}
        self._kept = kept

    def cut(self, store: nn.Module, name: str) -> _Cut | None:
        """Return the slices of a parameter as they are to be had now; None of a buffer."""
        registry = own_parameters(store)
        stacked = registry.get(name)
        if stacked is None or stacked.is_inference():  # such a tensor does not count its changes
            return None
        tracked, plain = torch.is_grad_enabled(), type(stacked) is nn.Parameter
        place = id(store), name, tracked
        cut = self._kept.get(place) if plain else None
        if cut is not None and cut.store is store and cut.is_still_there():
            cut.version = version_of(stacked)
        else:
            slices = by_member(store, name, stacked.detach() if plain and not tracked else stacked).unbind(0)
            address, gradient = stacked.data_ptr() if plain else 0, stacked.grad
            cut = _Cut(store, registry, name, stacked, version_of(stacked), address, tracked, slices)
            for member, part in zip(
                slices, () if gradient is None else by_member(store, name, gradient).unbind(0), strict=False
            ):
                member.grad = part
            if plain and gradient is None:  # one that is kept would be held after `zero_grad`
                self._kept[place] = cut
        self.cuts.setdefault(store, {})[name] = cut
        return cut


class _Local(threading.local):
    call: _SharingCall | None = None


sharing = _Local()
"""The call of this thread that members share slices in; None outside of one."""
