"""What the parts of a trace may ask of the tracer, besides what the proxies ask of it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import fx, nn

from ...runtime.guards import Source
from ...runtime.values import ModelNames
from ..examples import Untraceable
from ..isolation import Change
from ..proxies import Recorder, ValueProxy
from ..reads import DataFlow

__all__ = ["Tracer"]


class Tracer(Recorder, Protocol):
    """A tracer, as its parts know it. `places` says where a placeholder's value is in the arguments; questions are
    `liftable` to before the graph runs while no tensor was reshaped in place; `failure` is why the module was given up.
    """

    graph: fx.Graph
    module: nn.Module
    owner: str
    names: ModelNames
    examples: dict[fx.Node, Any]
    data: DataFlow
    places: dict[str, Source]
    liftable: bool
    failure: Untraceable | None

    def give_up(self, reason: str, location: str | None = None) -> Untraceable: ...

    def opens(self, child: nn.Module) -> bool: ...

    def note_lasting(self, node: fx.Node, change: Change) -> None: ...

    def seen_names(self) -> set[str]: ...

    def source_node(self, kind: str, target: Any, value: Any, args: Any = (), kwargs: Any = None) -> ValueProxy: ...

    def constant(self, value: Any) -> Any: ...
