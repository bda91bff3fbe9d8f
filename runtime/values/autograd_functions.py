"""Custom autograd functions as graphs hold them: one node each, never broken open, with their own backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch.autograd import Function

__all__ = ["FunctionCall"]


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
        return cast("Any", self.function).apply(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return FunctionCall, (self.function,)
