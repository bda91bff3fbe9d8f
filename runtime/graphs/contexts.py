"""The contexts of torch that a forward may open around a part of itself, as values that open them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import torch

from ...compat.checkpoint import checkpoint
from ...errors import UsageError

__all__ = ["Context", "Opening", "Surrounding"]


@runtime_checkable
class Surrounding(Protocol):
    """What a region runs under."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call `function`, a bound method of the region, under the context."""
        ...


_OPENERS: Mapping[str, Callable[..., AbstractContextManager[Any]]] = {
    "autocast": torch.autocast,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "set_grad_enabled": torch.set_grad_enabled,
    "inference_mode": torch.inference_mode,
}


@dataclass(frozen=True, eq=False)
class Context:
    """Say what a part of a forward runs under; raises a UsageError where there is no such kind."""

    kind: str  # the name of torch's function: "autocast", "no_grad", "checkpoint", ...
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what that is called with

    def __post_init__(self) -> None:
        known = (*_OPENERS, "checkpoint")
        if self.kind not in known:
            raise UsageError(f"there is no context {self.kind!r}; the kinds are {', '.join(known)}")

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call `function` under the context."""
        if self.kind == "checkpoint":
            return checkpoint(function, args, self.settings)
        with _OPENERS[self.kind](**self.settings):
            return function(*args)

    @property
    def gradients(self) -> bool | None:
        """Return whether gradients are recorded under the context; None where it leaves that as it was."""
        mode = bool(self.settings.get("mode", True))
        known = {"no_grad": False, "enable_grad": True, "set_grad_enabled": mode, "inference_mode": not mode}
        return known.get(self.kind)

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"


@dataclass(frozen=True, eq=False)
class Opening:
    """Run a part of a model under what `factory` opens: a new context manager at each call, or a UsageError."""

    factory: Callable[[], AbstractContextManager[Any]]

    def __post_init__(self) -> None:
        opened = cast("object", self.factory())
        if not isinstance(opened, AbstractContextManager):
            raise UsageError(
                f"context={self} returned {type(opened).__name__}, which is no context manager; give a function that "
                "returns a new one at each call: lambda: torch.no_grad()"
            )

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call `function` under the context."""
        with self.factory():
            return function(*args)

    def __str__(self) -> str:
        return getattr(self.factory, "__name__", type(self.factory).__name__)
