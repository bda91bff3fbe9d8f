"""See what attributes modules have at the time of a call, where a model sets them while it runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from ...runtime.values import Absent, copied

__all__ = ["AttributeWatch"]


class AttributeWatch:
    """Hold what some attributes of modules are now, to see later which have been set."""

    def __init__(self, watched: Mapping[nn.Module, Collection[str]]) -> None:
        self._start = {(m, name): m.__dict__.get(name, Absent) for m, names in watched.items() for name in names}
        self._inside: dict[nn.Module, list[tuple[nn.Module, str]]] = {}

    def seen_from(self, module: nn.Module) -> dict[tuple[nn.Module, str], Any]:
        """Return what has been set in a module and those inside it: (module, name) -> value, tensors copied."""
        places = self._inside.get(module)
        if places is None:
            inside = set(module.modules())
            places = self._inside[module] = [place for place in self._start if place[0] in inside]
        now = {place: place[0].__dict__.get(place[1], Absent) for place in places}
        return {p: copied(v) if isinstance(v, Tensor) else v for p, v in now.items() if v is not self._start[p]}
