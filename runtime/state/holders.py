"""Who owns what a module's graph calls: the module itself or, for what runs under a context, the module around it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ...compat import own_children
from ..graphs import ContextRegion

__all__ = ["Holder", "add_child", "holder_of"]


@dataclass(frozen=True)
class Holder:
    """What owns the children that a graph calls: the owner, or what is around its context regions."""

    name: str
    module: nn.Module
    regions: tuple[ContextRegion, ...]
    names: tuple[str, ...]

    def qualified(self, name: str) -> str:
        """Return what the model calls a module or tensor that is called `name` in the owner, and so in the holder."""
        return self.inside + name

    @property
    def inside(self) -> str:
        """Return what the qualified names of all that is inside the holder begin with."""
        return f"{self.name}." if self.name else ""

    @property
    def borrowers_and_holder(self) -> tuple[nn.Module, ...]:
        """Return every module that has to hold a child for the owner to call it."""
        return (*self.regions, self.module)

    def share(self, name: str, module: nn.Module) -> None:
        """Register a new child of the holder, which the regions call by the same name."""
        add_child(self.module, name, module)
        for region in self.regions:
            region.borrow(name)


def add_child(module: nn.Module, name: str, child: nn.Module) -> None:
    """Register a new child, also of a container in which layers were folded: that refuses others, to users."""
    own_children(module)[name] = child


def holder_of(model: nn.Module, owner: str) -> Holder:
    """Return the holder of what the graph of the module called `owner` calls."""
    regions: dict[str, ContextRegion] = {}
    name, module = owner, model.get_submodule(owner)
    while isinstance(module, ContextRegion):
        regions[name] = module
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
    return Holder(name, module, tuple(regions.values()), tuple(regions))
