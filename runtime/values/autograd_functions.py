"""Functions that graphs hold as one node each, never broken open: custom autograd functions, and declared leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import fx, nn
from torch.autograd import Function

from ...errors import UsageError

__all__ = ["FunctionCall", "LeafCall", "leaf"]


@dataclass(frozen=True)
class FunctionCall:
    """Call a custom autograd function; stands in graphs for `function.apply`, new at each look."""

    function: type[Function]
    may_write: ClassVar[bool] = True

    def __post_init__(self) -> None:
        # What torch.fx prints of a function.
        object.__setattr__(self, "__name__", f"{self.function.__name__}.apply")
        object.__setattr__(self, "__module__", self.function.__module__)

    def __call__(self, *args: Any) -> Any:
        """Apply the function."""
        noted = _noted(self, args, {})
        return cast("Any", self.function).apply(*args) if noted is None else noted

    def __reduce__(self) -> tuple[Any, ...]:
        return FunctionCall, (self.function,)


@dataclass(frozen=True)
class LeafCall:
    """Call a function that was declared a leaf."""

    function: Callable[..., Any]
    may_write: ClassVar[bool] = True

    def __post_init__(self) -> None:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        object.__setattr__(self, "__name__", name)
        object.__setattr__(self, "__module__", getattr(self.function, "__module__", None) or "")
        object.__setattr__(self, "__doc__", self.function.__doc__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        noted = _noted(self, args, kwargs)
        return self.function(*args, **kwargs) if noted is None else noted

    def __reduce__(self) -> tuple[Any, ...]:
        return LeafCall, (self.function,)


def _noted(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Proxy | None:
    """Return a node for a call on proxies of torch.fx, by which spellings of kernels are read."""
    proxy = next((each for each in (*args, *kwargs.values()) if isinstance(each, fx.Proxy)), None)
    return None if proxy is None else proxy.tracer.create_proxy("call_function", call, args, kwargs)


def leaf(function: Callable[..., Any]) -> Any:
    """Declare a function a leaf: call what is returned, and a graph holds each call as one node.

    For functions that tracing cannot follow: of an extension (pybind11, C), or Python that computes outside of torch.
    Its result must follow from its arguments. It is called as it is, also on copies in float64, with which results are
    compared; where it takes none, name a `reference` by `register_operator`. A write into an argument is noticed.

    Custom autograd functions are leaves without this. `leaf(LogClip)` is what graphs hold of `LogClip.apply`, to
    name in `OpInfo.functions` and in decompositions of a `Kernel`.

    Args:
        function: a callable, or a subclass of `torch.autograd.Function`. As a decorator of a function it works, too.

    Returns:
        What to call in its place, with the same arguments.

    Raises:
        UsageError: it cannot be called, or is a module, which tracing takes as it is.
    """
    if isinstance(function, (FunctionCall, LeafCall)):
        return function
    if isinstance(function, type):
        made = FunctionCall(function) if issubclass(function, Function) else None
    else:
        made = LeafCall(function) if callable(function) and not isinstance(function, nn.Module) else None
    if made is None:
        raise UsageError(f"leaf() is given {function!r}; give a function, or a subclass of torch.autograd.Function")
    return made
