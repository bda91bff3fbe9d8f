"""The names of a model's modules, without those by which regions know what they borrow."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ...compat import children_of, submodule
from ...tracing.graphs import Region
from ...tracing.values import qualified

__all__ = ["all_names", "modules_around"]


def all_names(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield every module of a model with each of its names; regions only borrow what they hold, but for regions."""
    pending: list[tuple[nn.Module, str]] = [(model, "")]
    while pending:
        module, path = pending.pop()
        yield module, path
        named = reversed(children_of(module).items())
        children = [(child, qualified(path, name)) for name, child in named if child is not None]
        pending += [each for each in children if isinstance(each[0], Region) or not isinstance(module, Region)]


def modules_around(model: nn.Module, module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield each module that has `module` inside, or is it, with the name of it there."""
    for found, path in list(all_names(model)):
        if found is module:
            parts = path.split(".") if path else []
            for count in range(len(parts) + 1):
                around = submodule(model, ".".join(parts[:count]))
                if around is not None:
                    yield around, ".".join(parts[count:])
