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

    def plain(self, proxy: Any) -> Any:
        """Return the plain value that a proxy stands for."""
        ...

    def text(self, proxy: Any, spec: str) -> str:
        """Answer `format(proxy, spec)`."""
        ...

    def truth(self, proxy: Any) -> bool:
        """Answer `bool(proxy)`."""
        ...

    def index(self, proxy: Any, frame: FrameType) -> int:
        """Answer `operator.index(proxy)`, asked by what runs in `frame`."""
        ...

    def length(self, proxy: Any) -> int:
        """Answer `len(proxy)`."""
        ...

    def length_of_tensor(self, proxy: Any) -> Any:
        """Answer `len(tensor)` with a value, which decides nothing as long as nobody asks."""
        ...

    def contains(self, proxy: Any, item: Any) -> bool:
        """Answer `item in proxy`."""
        ...

    def iterate(self, proxy: Any, frame: FrameType) -> Any:
        """Answer `iter(proxy)`, asked by what runs in `frame`."""
        ...


class Interception(Protocol):
    """What traced code does is sent to the tracer, but for two ways out."""

    def aside(self) -> AbstractContextManager[None]:
        """Let the tracer look at values without seeing itself do so."""
        ...

    def suspended(self) -> AbstractContextManager[None]:
        """Let what happens inside happen for real."""
        ...


class Recorder(Protocol):
    """A tracer, as the proxies that it hands out know it; `changes` are those that outlive the call."""

    changes: Changes

    @property
    def session(self) -> Interception:
        """Return the ways out of the interception."""
        ...

    @property
    def decisions(self) -> Questions:
        """Return what answers the questions that steer."""
        ...

    def fail(self, reason: str, location: str | None = None) -> NoReturn:
        """Give the module up."""
        ...

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
    ) -> Any:
        """Add a node whose example value is `value`; return what the traced code sees of it."""
        ...

    def note_class(self, module: nn.Module) -> None:
        """Note that traced code asks for the class of a module."""
        ...

    def create_proxy(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operation, and do it on the example values."""
        ...

    def values(self, arguments: Any) -> Any:
        """Return `arguments` with example values in place of proxies."""
        ...

    def torch_function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a torch function, method or property access."""
        ...

    def attribute_of(self, proxy: Any, name: str) -> Any:
        """Answer a read of a proxy's attribute."""
        ...

    def set_attribute(self, proxy: Any, name: str, value: Any) -> None:
        """Record the assignment of an attribute to an object."""
        ...

    def hash_of(self, proxy: Any, frame: FrameType) -> int:
        """Answer `hash(proxy)`, asked by what runs in `frame`."""
        ...

    def is_instance(self, proxy: Any, kinds: Any) -> bool:
        """Answer `isinstance(proxy, kinds)`."""
        ...
