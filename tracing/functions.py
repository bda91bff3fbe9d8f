"""Custom autograd functions: one node each, never broken open, with their own backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch.autograd import Function

from ..compat import function_entries, is_reentrant_checkpoint
from .held_tensors import change_count
from .proxy import UNKNOWN
from .structure import tensors_in

if TYPE_CHECKING:
    from .session import Session
    from .tracer import ModuleTracer

__all__ = ["FunctionCall", "patch_functions"]


@dataclass(frozen=True)
class FunctionCall:
    """Call a custom autograd function; stands in graphs for `function.apply`, which is another object at each look.

    Attributes:
        function: the user's class.
        may_write: what is to be assumed of a call that was never seen.
    """

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


def patch_functions(session: Session) -> None:
    """Send calls of custom autograd functions made by traced code to its tracer."""
    (single, apply), (dead, unwrap) = function_entries()
    original = getattr(dead, unwrap)

    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        if session.tracer is None:
            return cast("Any", super(single, function)).apply(*args, **kwargs)
        return _call(session.tracer, function, args)

    def unwrapped(args: Any) -> Any:
        return original(args) if session.tracer is None else args

    session.patch(single, apply, classmethod(called))
    session.patch(dead, unwrap, unwrapped)


def _call(tracer: ModuleTracer, function: type[Function], args: tuple[Any, ...]) -> Any:
    """Record a call; whether it writes into its arguments is seen on the example values."""
    if is_reentrant_checkpoint(function):
        tracer.fail("checkpoint is used with use_reentrant=True")
    with tracer.session.aside():
        values = tracer.values(args)
        counts = [(tensor, change_count(tensor)) for tensor in tensors_in(values)]
    result = tracer.create_proxy("call_function", FunctionCall(function), args, {})
    node = tracer.graph.find_nodes(op="call_function", target=FunctionCall(function))[-1]
    with tracer.session.aside():
        changed = any(change_count(tensor) != count for tensor, count in counts)
    node.meta["writes"] = changed or values is UNKNOWN
    return result
