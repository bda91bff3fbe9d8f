"""A list of experts in which some are gone: it has the names of all, and the items that are left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self, cast, overload

from torch import nn

from ...compat import own_buffers, own_children, own_parameters

__all__ = ["KeptExperts", "RemovedExpert", "item_names"]


class RemovedExpert(nn.Module):
    """The names of an expert's tensors, which are empty: old checkpoints have them. It is never called."""

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Return what is left of a module: its tensors, under their names."""
        made = cls()
        for name, parameter in own_parameters(module).items():
            made.register_parameter(name, parameter)
        for name, buffer in own_buffers(module).items():
            made.register_buffer(name, buffer, name not in module._non_persistent_buffers_set)
        for name, child in own_children(module).items():
            made.add_module(name, None if child is None else RemovedExpert.of(child))
        return made


class KeptExperts(nn.ModuleList):
    """The items of a list that are kept, in order, by the names that they had: `len`, indices and loops find these."""

    kept: tuple[str, ...]

    @classmethod
    def of(cls, modules: nn.ModuleList, kept: Sequence[int]) -> KeptExperts:
        """Return a list with the items of these numbers alone; it may have fewer already."""
        made, names = cls(), item_names(modules)
        made.kept = tuple(names[number] for number in kept)
        for name, child in own_children(modules).items():
            gone = name in names and name not in made.kept
            made.add_module(name, RemovedExpert.of(cast("nn.Module", child)) if gone else child)
        return made

    def __len__(self) -> int:
        return len(self.kept)

    def __iter__(self) -> Iterator[nn.Module]:
        return (self._modules[name] for name in self.kept)

    @overload
    def __getitem__(self, idx: slice) -> nn.ModuleList: ...
    @overload
    def __getitem__(self, idx: int) -> nn.Module: ...
    def __getitem__(self, idx: Any) -> nn.Module:
        if isinstance(idx, slice):
            return nn.ModuleList(list(self)[idx])
        return self._modules[self.kept[idx]]


def item_names(modules: nn.ModuleList) -> tuple[str, ...]:
    """Return the names of a list's items."""
    return modules.kept if isinstance(modules, KeptExperts) else tuple(own_children(modules))
