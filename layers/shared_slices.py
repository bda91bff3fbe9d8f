"""How code reads a member's parameter: as a slice, of those that were cut once for all of a call of members one by one.
Autograd then has one node, not one for each member whose backward fills a tensor of the size of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..compat import own_parameters, version_of
from ..operators.cache import Cache
from ..runtime.graphs import this_call
from ..runtime.state import VIEWS
from .slices import View, by_member

__all__ = ["live"]

_KEPT = "_fxopt_slices"
"""In the `__dict__` of a module that holds stacked parameters: slices that are kept between calls."""


@dataclass(slots=True)
class _Cut:
    """The slices of a parameter along dimension 0: right while it is in the `registry`, not written to, and `tracked`
    if gradients are asked for.
    """

    registry: dict[str, nn.Parameter | None]
    stacked: Tensor
    version: int
    tracked: bool
    slices: tuple[Tensor, ...]


def live(name: str) -> property:
    """Return the property through which a member's parameter is read; writing goes through `__setattr__`."""

    def read(self: nn.Module) -> Tensor:
        try:
            view: View = self.__dict__[VIEWS][name]
        except KeyError:
            raise AttributeError(name) from None
        cuts = this_call.kept
        if cuts is None:
            return view.read()
        store, stacked, position = view
        try:
            cut = cuts[store][stacked]
        except KeyError:
            cut = _cut(store, stacked, cuts)
        else:
            # Written out, for a call costs more than the answer: members read hundreds of times in a call of the model.
            tensor = cut.stacked
            same = cut.registry.get(stacked) is tensor and cut.version == version_of(tensor)
            if not same or not (cut.tracked or not torch.is_grad_enabled()):
                cut = _cut(store, stacked, cuts)
        return view.read() if cut is None else cut.slices[position]

    return property(read)


def _cut(store: nn.Module, name: str, cuts: dict[nn.Module, dict[str, _Cut]]) -> _Cut | None:
    """Return the slices of a parameter as they are to be had now, and note them in `cuts`; None of a buffer.
    They are kept between calls while the parameter is the same, and has no gradient, which `zero_grad` is to free.
    """
    registry = own_parameters(store)
    stacked = registry.get(name)
    if stacked is None or stacked.is_inference():  # such a tensor does not count its changes
        return None
    tracked, plain, gradient = torch.is_grad_enabled(), type(stacked) is nn.Parameter, stacked.grad

    def slices_of(whole: Tensor) -> tuple[Tensor, ...]:
        return by_member(store, name, whole.detach() if plain and not tracked else whole).unbind(0)

    if plain and gradient is None:
        kept: Cache = vars(store).setdefault(_KEPT, Cache())
        slices = kept.of(slices_of, stacked, key=(name, tracked, stacked.requires_grad))
    else:
        slices = slices_of(stacked)
    if gradient is not None:
        for member, part in zip(slices, by_member(store, name, gradient).unbind(0), strict=True):
            member.grad = part
    cut = cuts.setdefault(store, {})[name] = _Cut(registry, stacked, version_of(stacked), tracked, slices)
    return cut
