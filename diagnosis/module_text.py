"""Modules as text: classes for graphs, expressions for layers of torch."""

from __future__ import annotations

import builtins
import importlib
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn

__all__ = ["ModuleText", "NotWritten", "tensor_text"]

_MOST_NUMBERS = 64
"""So many numbers of a tensor of integers are written out."""


class NotWritten(Exception):
    """Something cannot be written as text; the message says what."""


class ModuleText:
    """The expressions that make modules, with the `classes` and `imports` that these need."""

    def __init__(self) -> None:
        self.imports = dict[str, None]()
        self.classes = list[str]()

    def module(self, module: nn.Module) -> str:
        """Return the expression that makes a module."""
        kind = type(module)
        if isinstance(module, fx.GraphModule):
            return f"{self._class(module)}()"
        children = dict(module.named_children())
        if kind in (nn.Sequential, nn.ModuleList) and list(children) == [str(i) for i in range(len(children))]:
            return f"nn.{kind.__name__}({self._listed(kind, children)})"
        if children and kind in (nn.Module, nn.ModuleDict) and not list(module.parameters(recurse=False)):
            parts = ", ".join(f"{name!r}: {self.module(child)}" for name, child in children.items())
            return f"nn.ModuleDict({{{parts}}})"
        return _layer(module)

    def _listed(self, kind: type[nn.Module], children: Mapping[str, nn.Module]) -> str:
        parts = ", ".join(map(self.module, children.values()))
        return f"[{parts}]" if kind is nn.ModuleList else parts

    def _class(self, module: fx.GraphModule) -> str:
        made = [f"self.add_module({name!r}, {self.module(child)})" for name, child in module.named_children()]
        made += [
            f"self.{name} = nn.Parameter({tensor_text(each)})" for name, each in module.named_parameters(recurse=False)
        ]
        made += [
            f"self.register_buffer({name!r}, {tensor_text(each)})" for name, each in module.named_buffers(recurse=False)
        ]
        code = module.graph.python_code("self")
        for name, value in code.globals.items():
            if re.search(rf"\b{name}\b", code.src):  # torch.fx names some that most graphs do not need
                self._import(name, value)
        forward = code.src.strip().splitlines()
        name = f"Reduced{len(self.classes) or ''}"
        body = ["def __init__(self):", "    super().__init__()", *(f"    {line}" for line in made), "", *forward]
        indented = (f"    {line}".rstrip() for line in body)
        self.classes.append("\n".join([f"class {name}(nn.Module):", *indented]))
        return name

    def _import(self, name: str, value: Any) -> None:
        """Note how a name in the code of a graph is imported."""
        if name == "torch" or getattr(builtins, name, None) is value:
            return
        if isinstance(value, ModuleType):
            self.imports[f"import {value.__name__} as {name}"] = None
        elif isinstance(value, float):
            self.imports[f"from math import {name}"] = None
        elif name == "device":
            self.imports["from torch import device"] = None
        elif value is type(None):
            self.imports["from types import NoneType"] = None
        else:
            self.imports[f"from {_home(value)} import {getattr(value, '__name__', '')} as {name}"] = None


def _home(value: Any) -> str:
    """Return the module that has a function under its name."""
    name, home = getattr(value, "__name__", ""), getattr(value, "__module__", None) or ""
    try:
        found = getattr(importlib.import_module(home), name, None)
    except (ImportError, ValueError):
        found = None
    if found is not value:
        raise NotWritten(f"{value!r} cannot be imported by its name")
    return home


def _layer(module: nn.Module) -> str:
    """Return what makes a layer of torch: what it prints, where that makes one of the same tensors."""
    text = f"nn.{' '.join(repr(module).split())}"
    dtypes = {each.dtype for each in module.parameters() if each.dtype is not torch.float32}
    text += f".to({dtypes.pop()})" if len(dtypes) == 1 else ""
    try:
        if type(module) is not getattr(nn, type(module).__name__, None):
            raise TypeError
        made: Any = eval(text, {"nn": nn, "torch": torch})  # noqa: S307  what torch prints of its own layer
    except Exception:
        raise NotWritten(f"a {type(module).__module__}.{type(module).__name__} cannot be written as text") from None
    if _form(made) != _form(module):
        raise NotWritten(f"a {type(module).__name__} has other tensors than one that is made by {text}")
    return text


def _form(module: nn.Module) -> dict[str, Any]:
    return {name: (each.shape, each.dtype) for name, each in module.state_dict().items()}


def tensor_text(value: Any) -> str:
    """Return what makes a tensor like this one: floats are drawn, a few integers are written out."""
    if not isinstance(value, Tensor):
        if value is None or type(value) in (bool, int, float, str):
            return repr(value)
        raise NotWritten(f"an argument of type {type(value).__name__} cannot be written as text")
    if value.is_floating_point() or value.is_complex():
        return f"torch.randn({list(value.shape)}, dtype={value.dtype})"
    if value.numel() <= _MOST_NUMBERS:
        return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
    raise NotWritten("a tensor of integers is too large to be written out")
