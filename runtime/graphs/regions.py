"""Modules that run a part of their owner's graph, on the children that the owner has at the time."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ...compat import BORROWED, REGIONS, own_children
from ...errors import CaptureError
from .contexts import Context, Surrounding

__all__ = [
    "ContextRegion", "Region", "WrappedRegion", "add_region", "context_regions", "regions_of", "remove_region",
    "replicate_regions", "share_children",
]  # fmt: skip


class Region(nn.Module):
    """A part of its owner's graph, no child, which calls what the owner has by the `borrowed` names."""

    def __init__(self, owner: nn.Module, borrowed: Iterable[str]) -> None:
        super().__init__()
        self.__dict__[BORROWED] = tuple(borrowed)
        self.__dict__["_modules"] = own_children(owner)
        self.training = owner.training

    @property
    def borrowed(self) -> tuple[str, ...]:
        """Return the names that the owner has for what the region calls."""
        return self.__dict__[BORROWED]

    def borrow(self, path: str) -> None:
        """Note that the region calls another of its owner's modules."""
        self.__dict__[BORROWED] = (*self.borrowed, path)

    @property
    def changes_results(self) -> bool:
        """Say whether the owner's own forward, which goes without the region, computes something else."""
        return True

    def forward(self, *args: Any) -> Any:
        """Run the region's graph; it has no other forward."""
        raise CaptureError("this region has no graph any more")

    def named_modules(self, *args: Any, **kwargs: Any) -> Generator[Any, Any, None]:
        """Yield nothing: all that a region calls is listed by its owner, and a wrapper around it is no second one."""
        yield from ()

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield nothing: conversions and modes reach the children by their owner."""
        return iter(())

    def state_dict(self, *args: Any, destination: Any = None, **kwargs: Any) -> Any:
        """Write nothing: the owner's own names cover the children."""
        return {} if destination is None else destination


class WrappedRegion(Region):
    """A part of its owner's graph that runs under a context; calling the region opens it."""

    def __init__(self, context: Surrounding, owner: nn.Module, borrowed: Iterable[str]) -> None:
        super().__init__(owner, borrowed)
        self.context = context

    def __call__(self, *args: Any) -> Any:
        """Run the region's graph, whatever its forward is now, under the context."""
        return self.context.run(super().__call__, args)

    @property
    def changes_results(self) -> bool:
        """Say whether something else comes out where the context is not opened; a context may say that it does not."""
        return bool(getattr(self.context, "changes_results", True))

    def __repr__(self) -> str:
        """Name the context."""
        return f"{type(self).__name__}({self.context})"


class ContextRegion(WrappedRegion):
    """A part of a forward that the user put under a context."""

    def __init__(self, context: Context, owner: nn.Module, borrowed: Iterable[str]) -> None:
        super().__init__(context, owner, borrowed)
        self.context: Context = context


def regions_of(module: nn.Module) -> dict[str, Region]:
    """Return the parts of a module's graphs that run as modules of their own, by name."""
    attributes = module.__dict__
    return {name: attributes[name] for name in attributes.get(REGIONS, ())}


def context_regions(attributes: Mapping[str, Any]) -> dict[str, ContextRegion]:
    """Return those among a module's attributes that are parts of its original forward, put under a context."""
    named = ((name, attributes[name]) for name in attributes.get(REGIONS, ()))
    return {name: region for name, region in named if isinstance(region, ContextRegion)}


def add_region(owner: nn.Module, name: str, region: Region) -> None:
    """Give a module a region; its own way of setting attributes is not asked."""
    owner.__dict__[REGIONS] = (*owner.__dict__.get(REGIONS, ()), name)
    owner.__dict__[name] = region


def remove_region(owner: nn.Module, name: str) -> None:
    """Take a region away."""
    left = tuple(each for each in owner.__dict__.pop(REGIONS) if each != name)
    if left:
        owner.__dict__[REGIONS] = left
    del owner.__dict__[name]


def share_children(owner: nn.Module) -> None:
    """Let the regions of a module, which has another register of children now, call what is in it."""
    for region in regions_of(owner).values():
        region.__dict__["_modules"] = own_children(owner)
        share_children(region)


def replicate_regions(module: nn.Module) -> None:
    """Give a module that has another register of children, perhaps as a copy of another one, regions of its own."""
    for name, region in regions_of(module).items():
        own = nn.Module.__new__(type(region))
        own.__dict__.update(region.__dict__, _modules=own_children(module))
        module.__dict__[name] = own
        replicate_regions(own)
