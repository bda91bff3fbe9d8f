"""The form of example calls as plain JSON values, and calls of that form drawn anew: what an archive keeps of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ...runtime.values import DTYPES
from ..examples import Generating, Inputs
from .object_forms import Unmade, class_of, class_text, held_by, made_of

__all__ = ["call_forms", "calls_of_forms"]

_MOST_ELEMENTS = 2**24
"""So many elements of all tensors are drawn: what a reader holds stays small, whatever a file asks for."""
_DEEPEST = 20
_LARGEST = 2**53
_SEED = 0
_CPU = torch.device("cpu")


class _NoForm(Exception):
    """A value that JSON cannot describe."""


def call_forms(calls: Sequence[Inputs]) -> list[dict[str, Any]]:
    """Return what calls look like, or nothing where JSON cannot describe an argument. Of a tensor these are its shape,
    dtype, smallest and largest number, and whether a vector ascends; of an object its class and what it holds.
    """
    try:
        forms: list[dict[str, Any]] = [
            {
                "module": call.module,
                "generating": isinstance(call, Generating),
                "args": _form(call.args),
                "kwargs": _form(call.kwargs),
            }
            for call in calls
        ]
        calls_of_forms(forms, draw=False)
    except (_NoForm, Unmade, ValueError):
        return []
    return forms


def calls_of_forms(
    forms: object, *, packages: Collection[str] | None = None, device: torch.device = _CPU, draw: bool = True
) -> list[Inputs]:
    """Return calls of these forms, with tensors on a device; equal forms give equal calls. Objects are of classes from
    these packages (None: from all), and none of their code runs. Without `draw`, tensors are on the meta device.
    ValueError if they are no forms, or ask for more elements than are drawn; Unmade if they have other objects.
    """
    reader = _Reader(packages, device, draw)
    if not isinstance(forms, list):
        raise ValueError("the forms of calls are not a list")
    return [reader.call(form) for form in cast("list[object]", forms)]


def _form(value: object, depth: int = 0, holder: type | None = None) -> Any:
    """Return the form of a value, which an object of the class `holder` holds."""
    if depth > _DEEPEST:
        raise _NoForm
    if value is None or isinstance(value, (bool, str, int, float)):
        return _plain(value)
    if type(value) is Tensor and value.layout == torch.strided and not value.is_meta:
        return _tensor_form(value)
    if type(value) in (tuple, list, torch.Size):
        return {type(value).__name__: [_form(item, depth + 1) for item in cast("Sequence[Any]", value)]}
    if type(value) is dict:
        return _dict_form(cast("dict[Any, Any]", value), depth)
    held = held_by(value)
    if held is None:
        return _constant_form(value, holder)
    kind = type(value)
    return {"object": class_text(kind), "holds": {name: _form(part, depth + 1, kind) for name, part in held.items()}}


def _constant_form(value: object, holder: type | None) -> dict[str, Any]:
    if isinstance(value, slice):
        limits = cast("slice[Any, Any, Any]", value)
        return {"slice": [_form(each) for each in (limits.start, limits.stop, limits.step)]}
    if isinstance(value, torch.dtype) and _dtype_name(value) in DTYPES:
        return {"dtype": _dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": value.type}  # for people: the value is the device of the tensors that are drawn
    if isinstance(value, type) and holder is not None and value.__module__ == holder.__module__:
        return {"class": class_text(value)}
    raise _NoForm


def _dict_form(value: dict[Any, Any], depth: int) -> dict[str, Any]:
    if all(type(key) is str for key in value):
        return {"dict": {key: _form(item, depth + 1) for key, item in value.items()}}
    if all(type(key) in (str, int, bool, type(None)) for key in value):
        return {"pairs": [[_plain(key), _form(item, depth + 1)] for key, item in value.items()]}
    raise _NoForm


def _plain(value: str | float | None) -> str | float | None:
    if type(value) in (bool, str, type(None)):
        return value
    if (type(value) is int and abs(value) <= _LARGEST) or (type(value) is float and math.isfinite(value)):
        return value
    raise _NoForm


def _tensor_form(tensor: Tensor) -> dict[str, Any]:
    name = _dtype_name(tensor.dtype)
    if name not in DTYPES:
        raise _NoForm
    values = tensor.detach()
    if values.dtype is torch.bool:
        values = values.byte()
    finite = values[values.isfinite()] if values.is_floating_point() else values
    low, high = (each.item() for each in torch.aminmax(finite)) if finite.numel() else (0, 0)
    ascending = values.dim() == 1 and not values.is_floating_point() and bool((values.diff() >= 0).all())
    return {"tensor": name, "shape": list(tensor.shape), "low": low, "high": high, "ascending": ascending}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Reader:
    """Make calls of their forms, checking each entry as it is read."""

    def __init__(self, packages: Collection[str] | None, device: torch.device, draw: bool) -> None:
        self._packages, self._device, self._draw = packages, device, draw
        self._left = _MOST_ELEMENTS
        self._random = torch.Generator().manual_seed(_SEED)

    def call(self, form: object) -> Inputs:
        fields = _object(form)
        module, generating = fields.get("module"), fields.get("generating")
        args, kwargs = self._value(fields.get("args")), self._value(fields.get("kwargs"))
        if type(module) is not str or type(generating) is not bool or type(args) is not tuple:
            raise ValueError("the form of a call is malformed")
        if type(kwargs) is not dict:
            raise ValueError("the form of a call has no keyword arguments")
        named = cast("dict[str, Any]", kwargs)
        return Generating(*args, **named) if generating else Inputs.of_part(module, *args, **named)

    def _value(self, form: object, depth: int = 0, holder: type | None = None) -> Any:
        if depth > _DEEPEST:
            raise ValueError("the form of a call is too deep")
        if form is None or isinstance(form, (bool, int, float, str)):
            return form
        fields = _object(form)
        match next(iter(fields.items()), ("", None)):
            case "tensor", _:
                return self._tensor(fields)
            case "object", str(text):
                return self._made(text, _object(fields.get("holds")), depth)
            case "class", str(text) if holder is not None and text.partition(":")[0] == holder.__module__:
                return class_of(text, self._packages)
            case "dict", items:
                return {key: self._value(item, depth + 1) for key, item in _object(items).items()}
            case "dtype", str(name) if name in DTYPES:
                return DTYPES[name]
            case "device", str():
                return self._device
            case kind, items:
                return self._container(kind, items, depth)

    def _container(self, kind: str, given: object, depth: int) -> Any:
        if not isinstance(given, list):
            raise ValueError("the form of an argument is malformed")
        items = cast("list[object]", given)
        if kind == "pairs":
            return dict(self._pair(item, depth) for item in items)
        values = [self._value(item, depth + 1) for item in items]
        if kind == "Size" and all(type(value) is int for value in values):
            return torch.Size(values)
        if kind == "slice" and len(values) == 3:
            return slice(*values)
        if kind in ("tuple", "list"):
            return tuple(values) if kind == "tuple" else values
        raise ValueError("the form of an argument is malformed")

    def _pair(self, item: object, depth: int) -> tuple[Any, Any]:
        match cast("list[object]", item) if isinstance(item, list) else []:
            case [None | str() | int() as key, form]:
                return key, self._value(form, depth + 1)
            case _:
                raise ValueError("the form of an argument is malformed")

    def _made(self, text: str, held: Mapping[str, Any], depth: int) -> Any:
        cls = class_of(text, self._packages)
        return made_of(cls, {name: self._value(part, depth + 1, cls) for name, part in held.items()})

    def _tensor(self, fields: Mapping[str, Any]) -> Tensor:
        name = fields["tensor"]
        shape = _shape(fields.get("shape"))
        self._left -= math.prod(shape)
        if self._left < 0:
            raise ValueError(f"the form of a call has more than {_MOST_ELEMENTS:,} elements")
        dtype = DTYPES.get(name) if type(name) is str else None
        low, high = _number(fields.get("low")), _number(fields.get("high"))
        if dtype is None or low > high:
            raise ValueError("the form of a tensor is malformed")
        if not self._draw:
            return torch.empty(shape, dtype=dtype, device="meta")
        return self._filled(shape, dtype, low, high, ascending=fields.get("ascending") is True).to(self._device)

    def _filled(self, shape: list[int], dtype: torch.dtype, low: float, high: float, *, ascending: bool) -> Tensor:
        count = math.prod(shape)
        if dtype.is_floating_point:
            return (low + (high - low) * torch.rand(shape, generator=self._random)).to(dtype)
        first, last = int(low), int(high)
        if ascending:
            return (first + torch.arange(count) * (last - first + 1) // max(count, 1)).reshape(shape).to(dtype)
        drawn = torch.randint(first, last + 1, (count,), generator=self._random)
        drawn[:1], drawn[1:2] = last, first  # what a model reads from the range stays as it is
        return drawn.reshape(shape).to(dtype)


def _object(form: object) -> dict[str, Any]:
    if not isinstance(form, dict):
        raise ValueError("the form of a call is malformed")
    return cast("dict[str, Any]", form)


def _shape(sizes: object) -> list[int]:
    whole = cast("list[Any]", sizes) if isinstance(sizes, list) else None
    if whole is None or not all(type(size) is int and 0 <= size <= _LARGEST for size in whole):
        raise ValueError("the form of a tensor has no shape")
    return whole


def _number(value: object) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is int and abs(value) <= _LARGEST:
        return value
    raise ValueError("the form of a tensor has no numbers")
