"""Modules that run a part of their owner's graph, and borrow the children that it calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...compat import own_children
from ...errors import CaptureError
from .contexts import Context, Surrounding

__all__ = ["ContextRegion", "Region", "WrappedRegion", "context_regions", "lend"]


class Region(nn.Module):
    """A part of its owner's graph.

    It calls children that its owner still owns: names survive, so a region writes nothing into a state dict and takes
    nothing from one. Tensors of the owner come in as arguments.

    Attributes:
        origins: name of a child here -> its qualified name in the owner.
    """

    def __init__(self, children: Mapping[str, nn.Module], origins: Mapping[str, str]) -> None:
        super().__init__()
        self.origins = dict(origins)
        for name, child in children.items():
            self.add_module(name, child)

    @property
    def changes_results(self) -> bool:
        """Say whether the owner's own forward, which goes without the region, computes something else."""
        return True

    def forward(self, *args: Any) -> Any:
        """Run the region's graph; it has no other forward."""
        raise CaptureError("this region has no graph any more")

    def state_dict(self, *args: Any, destination: Any = None, **kwargs: Any) -> Any:
        """Write nothing: the owner's own names cover the children."""
        return {} if destination is None else destination

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        unexpected_keys += [name for name in state_dict if strict and name.startswith(prefix)]
        # The children are loaded under the owner's names; here they get what they have.
        for name, child in self.named_children():
            own: dict[str, Any] = {}  # given one, a member of an ensemble adds no views of what it does not hold
            state_dict.update(child.state_dict(destination=own, prefix=f"{prefix}{name}.", keep_vars=True))


class WrappedRegion(Region):
    """A part of its owner's graph that runs under a context; calling the region opens it.

    Attributes:
        context: what it runs under.
    """

    def __init__(self, context: Surrounding, children: Mapping[str, nn.Module], origins: Mapping[str, str]) -> None:
        super().__init__(children, origins)
        self.context = context

    def __call__(self, *args: Any) -> Any:
        """Run the region's graph, whatever its forward is now, under the context."""
        return self.context.run(super().__call__, args)

    @property
    def changes_results(self) -> bool:
        """Say whether something else comes out where the context is not opened; a context may say that it does not."""
        return bool(getattr(self.context, "changes_results", True))

    def extra_repr(self) -> str:
        """Name the context."""
        return str(self.context)


class ContextRegion(WrappedRegion):
    """A part of a forward that the user put under a context."""

    def __init__(self, context: Context, children: Mapping[str, nn.Module], origins: Mapping[str, str]) -> None:
        super().__init__(context, children, origins)
        self.context: Context = context


def context_regions(children: Mapping[str, object]) -> dict[str, ContextRegion]:
    """Return those among a module's children that are parts of its original forward, put under a context."""
    return {name: child for name, child in children.items() if isinstance(child, ContextRegion)}


def lend(owner: nn.Module, name: str, before: object, child: object) -> None:
    """Give a child that was put in the place of another one to the regions that have that, and to those within."""
    if not isinstance(before, nn.Module) or not isinstance(child, nn.Module) or before is child:
        return
    for region in [each for each in own_children(owner).values() if isinstance(each, Region)]:
        for mine, origin in region.origins.items():
            if origin == name and own_children(region).get(mine) is before:
                own_children(region)[mine] = child
                lend(region, mine, before, child)
