"""One call in the user's own hands: run as it is, while what its children give is kept, to go through it again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..compat import own_buffers, own_parameters
from .agreement import same_outputs
from .ambient import ambient_now
from .names import all_modules
from .preserve import ModelState, RandomState, change_count
from .record import Call, calls_intercepted
from .structure import copied

__all__ = ["Differs", "LiveCall"]

_Handler = Callable[[Callable[..., Any], nn.Module, Any, Any], Any]


class Differs(Exception):
    """A graph calls its children otherwise than the forward did."""


class LiveCall:
    """Hold one call of a module: its arguments, what it gave, and how it called its children.

    Attributes:
        call: arguments and results, as copies.
        changed: modules whose buffers the call changed in place.
        assigning: modules whose attributes the call set.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module = module
        self.call = Call(copied(args), copied(kwargs), None, None, ambient_now())
        self.changed: set[nn.Module] = set()
        self.assigning: set[nn.Module] = set()
        self._generators: list[RandomState] = []
        self._before = self._after = ModelState(module)

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `forward` on the arguments themselves and return what it gives; what it raises is the user's to see."""
        held = [
            (m, b, change_count(b)) for m in all_modules(self.module) for b in own_buffers(m).values() if b is not None
        ]
        data = self._before.data
        with calls_intercepted(_directly(self._note)), data.watched():
            output = forward(*args, **kwargs)
        self.call.output = copied(output)
        self.changed = {module for module, buffer, count in held if change_count(buffer) != count}
        touched = data.changed()
        self.changed |= {
            module
            for module in (all_modules(self.module) if touched else ())
            if not touched.isdisjoint(map(id, own_parameters(module).values()))
        }
        self.assigning = self._before.assigning()
        self._after = ModelState(self.module)
        self._after.data.keep(data.reached)
        return output

    def _note(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = Call(copied(args), copied(kwargs), None)
        output = original(module, *args, **kwargs)
        call.output = copied(output)
        self.call.children.append((module, call))
        self._generators.append(RandomState())
        return output

    @contextmanager
    def again(self) -> Generator[None]:
        """Go back to before the call for a while: buffers, attributes and random state; then to what it left."""
        self._before.restore()
        try:
            yield
        finally:
            self._after.restore()

    def gives_the_same(self, forward: Callable[..., Any]) -> bool:
        """Say whether `forward`, in the place of the module's own, calls the children alike and gives the same.

        The children do not run again: each gives what it gave. Call it inside of `again`.
        """
        recorded = deque(zip(self.call.children, self._generators, strict=True))

        def play(_: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not recorded:
                raise Differs
            (child, call), generators = recorded.popleft()
            given, expected = [*args, *kwargs.values()], [*call.args, *call.kwargs.values()]
            if child is not module or not same_outputs(given, expected):
                raise Differs
            generators.restore()
            return copied(call.output)

        self._before.restore()
        try:
            with calls_intercepted(_directly(play)):
                args, kwargs = copied(self.call.plain_arguments)
                output = forward(*args, **kwargs)
        except Differs:
            return False
        return not recorded and same_outputs(output, self.call.output)


def _directly(handler: _Handler) -> _Handler:
    """Return what sends calls of children, and not those inside of these, nor those of other threads, to `handler`."""
    thread, depth = threading.get_ident(), 0

    def intercept(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal depth
        if threading.get_ident() != thread or depth:
            return original(module, *args, **kwargs)
        depth += 1
        try:
            return handler(original, module, args, kwargs)
        finally:
            depth -= 1

    return intercept
