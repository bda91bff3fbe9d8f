"""Note how a model is called in a real run, to be given as example inputs."""

from __future__ import annotations

import enum
import threading
import warnings
from collections.abc import Generator, Hashable, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...compat import modules_by_name
from ...errors import FusedMemberError, UsageError
from ...runtime.graphs import Region
from ...runtime.values import has_attributes, is_container, is_leaf, map_tensors, parts_of
from ..examples import Inputs

__all__ = ["recording"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.layout)
_DEEPEST = 12


@contextmanager
def recording(model: nn.Module, limit: int = 16) -> Generator[list[Inputs]]:
    """Note the calls of a model inside of `with`: `with fxopt.recording(model) as calls: model.generate(...)`.

    One call of each kind is kept, as it was before the model ran, its tensors copied. Two calls are of one kind if they
    have the same structure, types and plain values, and tensors of the same dtypes, devices and ranks; of each size of
    a tensor counts whether it is 0, 1 or more, and of numbers that objects hold (caches, say) only their types.

    Calls of its parts that are made around its own forward are noted, too, as `Inputs.of_part`: `generate` calls the
    encoder of a T5 so.

    Args:
        model: the module whose calls are noted, in every thread; it is left as it was.
        limit: how many kinds are kept at the most; a warning says if there were more.

    Returns:
        On entering, a list that fills while the model runs: give it to `optimize` or `capture` as `example_inputs`.

    Raises:
        UsageError: `model` is no module, or `limit` is less than one.
    """
    if not isinstance(cast("object", model), nn.Module) or limit < 1:
        raise UsageError(f"recording takes a torch.nn.Module and a limit of at least 1, not {type(model)}, {limit}")
    notes = _Notes(limit, {module: name for name, module in modules_by_name(model).items() if _is_noted(name, module)})
    with ExitStack() as hooks:
        for module in notes.names:
            with suppress(FusedMemberError):  # nobody calls a fused member by itself
                hooks.callback(module.register_forward_pre_hook(notes, prepend=True, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(notes.returned).remove)
                hooks.callback(module.register_forward_hook(notes.ended, always_call=True).remove)
        yield notes.calls
    if notes.left_out:
        warnings.warn(
            f"the {type(model).__name__} was called in {limit + notes.left_out} ways; the first {limit} were kept",
            stacklevel=3,
        )


def _is_noted(name: str, module: nn.Module) -> bool:
    """Say whether calls of a module are noted: of the model's parts, of those that may have graphs."""
    return not name or not (is_leaf(module) or is_container(module) or isinstance(module, Region))


class _Notes:
    """Keep one call of each kind that returned; called as a hook before each forward."""

    def __init__(self, limit: int, names: Mapping[nn.Module, str]) -> None:
        self.calls: list[Inputs] = []
        self.names = names
        self._limit = limit
        self._kinds: set[Hashable] = set()
        self._adding = threading.Lock()
        self._running = threading.local()
        self._begun: dict[Hashable, Inputs | None] = {}
        """Of the kinds that have not returned yet, a call as it was."""

    @property
    def left_out(self) -> int:
        """Return how many kinds were met beyond the limit."""
        return len(self._kinds) - len(self.calls)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running, name = self._calls_now(), self.names.get(module)
        kind = None if name is None or (running and name) else (name, _kind((args, kwargs), 0))
        running.append((module, kind))  # a call of a part inside of another call has no kind
        if kind is None or name is None:
            return
        with self._adding:
            if kind not in self._kinds:
                self._begun[kind] = _kept(name, args, kwargs) if len(self.calls) < self._limit else None

    def returned(self, module: nn.Module, *_: object) -> None:
        """Keep the call that returned just now, if it is the first of its kind; one that raised stays out."""
        running = self._calls_now()
        kind = running[-1][1] if running and running[-1][0] is module else None
        if kind is None:
            return  # a call that had begun before, or inside of another
        with self._adding:
            call = self._begun.pop(kind, None)
            if kind not in self._kinds:
                self._kinds.add(kind)
                if call is not None and len(self.calls) < self._limit:
                    self.calls.append(call)

    def ended(self, module: nn.Module, *_: object) -> None:
        """Forget a call that returned or raised."""
        running = self._calls_now()
        if running and running[-1][0] is module:
            running.pop()

    def _calls_now(self) -> list[tuple[nn.Module, Hashable]]:
        return vars(self._running).setdefault("calls", [])

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies of the model, made meanwhile, note nothing in this list."""
        return _Notes, (0, {})


def _kept(module: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Return a call with copies of its tensors and objects; a tensor that is there twice is copied once."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    with torch.inference_mode(False):
        args, kwargs = map_tensors(copy, (args, kwargs))
    return Inputs.of_part(module, *args, **kwargs)


def _kind(value: Any, depth: int, *, held: bool = False) -> Hashable:
    """Return what is equal for values of one kind; `held` by an object, numbers count by their type."""
    cls = cast("Hashable", type(value))
    if isinstance(value, Tensor):
        return cls, value.dtype, value.device, tuple(min(size, 2) for size in value.shape)
    if isinstance(value, _PLAIN):
        return cls if held and isinstance(value, (int, float)) and cls is not bool else (cls, repr(value))
    if depth == _DEEPEST:
        return cls
    parts, inside = parts_of(value), held or has_attributes(value)
    return cls, tuple((key, _kind(part, depth + 1, held=inside)) for key, part in parts)
