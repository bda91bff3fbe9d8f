"""What proxies and the session may ask of a tracer: to record what is done to values, and to answer questions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NoReturn, Protocol

from torch import nn

from ..isolation import Change, Changes

__all__ = ["Interception", "Questions", "Recorder"]


class Questions(Protocol):
    """Questions to a proxy whose answers steer the Python around it."""

    def plain(self, proxy: Any) -> Any: ...

    def text(self, proxy: Any, spec: str) -> str: ...

    def truth(self, proxy: Any) -> bool: ...

    def index(self, proxy: Any, frame: FrameType) -> int: ...

    def length(self, proxy: Any) -> int: ...

    def contains(self, proxy: Any, item: Any) -> bool: ...

    def iterate(self, proxy: Any, frame: FrameType) -> Any: ...


class Interception(Protocol):
    """What traced code does is sent to the tracer, but for two ways out."""

    def aside(self) -> AbstractContextManager[None]: ...

    def suspended(self) -> AbstractContextManager[None]: ...


class Recorder(Protocol):
    """A tracer, as the proxies that it hands out know it; `changes` are those that outlive the call."""

    changes: Changes

    @property
    def session(self) -> Interception: ...

    @property
    def decisions(self) -> Questions: ...

    def fail(self, reason: str, location: str | None = None) -> NoReturn: ...

    def add(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        value: Any,
        *,
        optional: bool = False,
        fixed: bool = False,
        lasting: Change | None = None,
    ) -> Any: ...

    def note_class(self, module: nn.Module) -> None: ...

    def create_proxy(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def values(self, arguments: Any) -> Any: ...

    def torch_function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def attribute_of(self, proxy: Any, name: str) -> Any: ...

    def set_attribute(self, proxy: Any, name: str, value: Any) -> None: ...

    def hash_of(self, proxy: Any, frame: FrameType) -> int: ...

    def is_instance(self, proxy: Any, kinds: Any) -> bool: ...
