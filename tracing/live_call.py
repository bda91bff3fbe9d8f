"""One call in the user's own hands: run as it is, while what its children give is kept, to go through it again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..compat import all_modules, own_parameters
from .agreement import same_outputs
from .ambient import ambient_now
from .generators import RandomState
from .held_tensors import ChangeCounts, change_count
from .objects import copied_object, is_object, objects_in, tensors_within
from .preserve import ModelState
from .record import Call, calls_intercepted
from .regions import ContextRegion
from .rollback import graft
from .structure import copied, map_leaves

__all__ = ["Differs", "LiveCall"]

_Handler = Callable[[Callable[..., Any], nn.Module, Any, Any], Any]


class Differs(Exception):
    """A graph calls its children otherwise than the forward did."""


class LiveCall:
    """Hold one call of a module: its arguments, what it gave, and how it called its children.

    Args:
        module: which is called.
        args, kwargs: what with.
        deep: note how its children call theirs, too.

    Attributes:
        call: arguments and results, as copies.
        changed: modules whose buffers the call changed in place.
        assigning: modules whose attributes the call set.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, deep: bool = False) -> None:
        self.module, self.deep = module, deep
        self.call = Call(_noted(args), _noted(kwargs), None, None, ambient_now())
        self.changed: set[nn.Module] = set()
        self.assigning: dict[nn.Module, frozenset[str]] = {}
        self._generators: list[RandomState] = []
        self._running = [self.call]
        self._counts: list[tuple[Tensor, int | None]] = []
        self._before = self._after = ModelState(module)

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `forward` on the arguments themselves and return what it gives; what it raises is the user's to see."""
        counts = ChangeCounts(all_modules(self.module))
        data = self._before.data
        held = objects_in((args, kwargs))
        self._counts = [(tensor, change_count(tensor)) for tensor in tensors_within(held)]
        with calls_intercepted(_intercepting(self._note, deep=self.deep)), data.watched():
            output = forward(*args, **kwargs)
        self.call.after = _noted(held)
        self.call.output = copied(output)
        self.changed = counts.changed()
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

    @property
    def writes_into_objects(self) -> bool:
        """Say whether the call changed tensors that its arguments hold: they cannot be taken back."""
        return any(count is None or change_count(tensor) != count for tensor, count in self._counts)

    def _note(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        call, held = Call(_noted(args), _noted(kwargs), None), objects_in((args, kwargs))
        around = self._running[-1]
        self._running.append(call)
        try:
            output = original(module, *args, **kwargs)
        finally:
            self._running.pop()
        call.output, call.after = _noted(output), _noted(held)
        around.children.append((module, call))
        if around is self.call:
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
            pairs = zip(objects_in((args, kwargs)), objects_in((call.args, call.kwargs)), call.after, strict=True)
            for mine, before, after in pairs:
                graft(mine, before, after)
            return copied(call.output)

        self._before.restore()
        try:
            with calls_intercepted(_intercepting(play)):
                args, kwargs = copied(self.call.plain_arguments)
                output = forward(*args, **kwargs)
        except Differs:
            return False
        held = objects_in((args, kwargs))
        return not recorded and same_outputs([output, held], [self.call.output, self.call.after])


def _noted(value: Any) -> Any:
    """Return copies of the tensors in a value, and of the objects in it, which hold the same tensors as before."""

    def note(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return copied(leaf)
        return copied_object(leaf) if is_object(leaf) else leaf

    return map_leaves(note, value)


def _intercepting(handler: _Handler, *, deep: bool = False) -> _Handler:
    """Return what sends calls of children, and not those of other threads, to `handler`.

    Nor those inside of these, unless it goes `deep`.
    """
    thread, depth = threading.get_ident(), 0

    def intercept(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal depth
        if threading.get_ident() != thread or (depth and not deep) or isinstance(module, ContextRegion):
            return original(module, *args, **kwargs)
        depth += 1
        try:
            return handler(original, module, args, kwargs)
        finally:
            depth -= 1

    return intercept
