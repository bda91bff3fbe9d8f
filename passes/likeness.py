"""Describe a module so that equal descriptions mean equal rewrites: everything but the values of its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..compat import modules_by_name, own_buffers, own_children, own_parameters
from ..tracing.inputs import Inputs
from ..tracing.observe import FOUND

__all__ = ["Likeness", "Unlike"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
_REGISTRIES = frozenset(("_parameters", "_buffers", "_modules"))
_BOOKKEEPING = frozenset(("_fxopt_capture", "_fxopt_fallback", FOUND))
"""The graphs a module runs from: equal ones give the same class."""


class Unlike(Exception):
    """A module is like no other, since something in it cannot be compared."""


@dataclasses.dataclass(frozen=True)
class _Same:
    """Stand for one object, which is equal to itself only; holding it keeps its identity from being used again."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Likeness:
    """What may matter to a rewrite of a module, or to its speed, and is not a value of a tensor.

    These are the classes of the modules in it, which stand for the code of their graphs too; their settings and flags;
    shape, type, device, strides and `requires_grad` of their tensors, and which of these are one tensor.

    Attributes:
        description: equal for modules that are alike.
        tensors: id -> name of each tensor in it; None for one that no parameter or buffer registers.
    """

    def __init__(self, module: nn.Module) -> None:
        """Describe `module`.

        Raises:
            Unlike: if it has hooks, which nobody can compare.
        """
        self.tensors: dict[int, str | None] = {}
        self._held: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._paths: dict[nn.Module, str] = {}
        self._paths.update({inner: path for path, inner in modules_by_name(module).items()})
        self.description: Hashable = tuple(self._module(inner, path) for inner, path in self._paths.items())

    def _module(self, module: nn.Module, path: str) -> Hashable:
        prefix = f"{path}." if path else ""
        registered = {**own_parameters(module), **own_buffers(module)}
        tensors = tuple((name, self._registered(prefix + name, tensor)) for name, tensor in registered.items())
        children = tuple((name, self._value(child)) for name, child in own_children(module).items())
        return path, type(module), tensors, children, tuple(self._attributes(module))

    def _registered(self, name: str, tensor: Tensor | None) -> Hashable:
        if tensor is not None:
            self.tensors.setdefault(id(tensor), name)
        return self._value(tensor)

    def _attributes(self, module: nn.Module) -> Iterable[Hashable]:
        for name, value in vars(module).items():
            if "_hooks" in name and value:
                raise Unlike(f"'{self._paths[module]}' has hooks")
            if "_hooks" not in name and name not in _REGISTRIES and name not in _BOOKKEEPING:
                yield name, self._value(value)

    def _value(self, value: Any) -> Hashable:
        kind = cast("type[Any]", type(value))
        if kind in _PLAIN:
            return kind, value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return "module", self._paths.get(value, _Same(value))
        if _holds_more(value):
            return _Same(value)
        if isinstance(value, (tuple, list)):
            return kind, tuple(map(self._value, cast("Sequence[Any]", value)))
        if kind in (set, frozenset):
            return kind, frozenset(map(self._value, value))
        if isinstance(value, Mapping):
            mapping = cast("Mapping[Any, Any]", value)
            default = self._value(getattr(mapping, "default_factory", None))
            return kind, default, tuple((self._value(key), self._value(item)) for key, item in mapping.items())
        return self._object(value)

    def _object(self, value: Any) -> Hashable:
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return _Same(value)
        names = (field.name for field in dataclasses.fields(value))
        return type(value), tuple(self._value(getattr(value, name)) for name in names)

    def _tensor(self, tensor: Tensor) -> Hashable:
        self._held.append(tensor)
        self.tensors.setdefault(id(tensor), None)
        return _form(tensor), self._numbers.setdefault(id(tensor), len(self._numbers))

    def of_calls(self, calls: Sequence[Inputs]) -> Hashable:
        """Describe the arguments of calls; a tensor that is the module's own, too, is described as that."""
        return tuple((self._value(call.args), self._value(call.kwargs)) for call in calls)


def _holds_more(value: Any) -> bool:
    """Say whether an object holds more than its items or the fields of a dataclass, which are all that is compared."""
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set[str]()
    return not fields.issuperset(getattr(value, "__dict__", ()))


def _form(tensor: Tensor) -> Hashable:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    form = type(tensor), tuple(tensor.shape), tensor.dtype, tensor.device, tensor.layout, strides
    return (*form, tensor.requires_grad, tensor.is_conj(), tensor.is_neg())
