"""Every name that every module and tensor of a model has; shared ones have several."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn

from ...compat import all_modules, has_state_hooks, modules_by_name, own_buffers, own_parameters, transient_buffers
from .dynamic import cached_by_class

__all__ = [
    "INTERNAL",
    "ModelNames",
    "all_inside",
    "all_tensors",
    "is_meta",
    "is_sharded",
    "own_part",
    "qualified",
    "tensors_by_name",
    "whole_tensor",
]

INTERNAL = frozenset(nn.Module().__dict__)
"""The attributes that torch gives every module."""


def all_inside(modules: Iterable[nn.Module]) -> dict[nn.Module, None]:
    """Return every module in some, these first each, once."""
    found: dict[nn.Module, None] = {}
    for module in modules:
        if module not in found:
            found.update(dict.fromkeys(all_modules(module)))
    return found


def all_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return every parameter and buffer of some modules once, in any order."""
    found: dict[int, Tensor] = {}  # by identity, which a tensor's own hash takes a Python call for
    for module in modules:
        for registry in (own_parameters(module), own_buffers(module)):
            for tensor in registry.values():
                if tensor is not None:
                    found[id(tensor)] = tensor
    return list(found.values())


def is_meta(model: nn.Module) -> bool:
    """Say whether a model is on the meta device: it has parameters, and all of them are there."""
    has_any = False
    for module in all_modules(model):
        for parameter in own_parameters(module).values():
            if parameter is not None and not parameter.is_meta:
                return False
            has_any = has_any or parameter is not None
    return has_any


def is_sharded(tensor: object) -> bool:
    """Say whether a tensor is a `DTensor`, as sharding makes them; nothing is imported to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def own_part(tensor: Tensor) -> Tensor:
    """Return what this process has of a tensor: of one that is not sharded, all."""
    return cast("Any", tensor).to_local() if is_sharded(tensor) else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return all of a tensor, gathered where it is sharded: every process that has a part calls this."""
    return cast("Any", tensor).full_tensor() if is_sharded(tensor) else tensor


def tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer of `model`; one that has several names is there under each."""
    return ModelNames(model).registered()


def _registered(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the parameters and buffers of one module by their names in it."""
    parameters, buffers = own_parameters(module), own_buffers(module)
    return {**parameters, **buffers} if buffers else {**parameters}


class ModelNames:
    """Look up modules by qualified name, and names by module."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = modules_by_name(model, every_name=True)
        self._names: dict[nn.Module, list[str]] = {}
        for name, module in self.modules.items():
            self._names.setdefault(module, []).append(name)

    def all_of_each(self) -> Iterable[tuple[nn.Module, Sequence[str]]]:
        """Return every module once, with all its names."""
        return self._names.items()

    def names(self, module: nn.Module) -> Sequence[str]:
        """Return all names of a module in the model, the first one first."""
        return self._names[module]

    def __contains__(self, module: object) -> bool:
        return module in self._names

    def name(self, module: nn.Module) -> str:
        """Return the first name of a module in the model."""
        return self._names[module][0]

    @property
    def distinct(self) -> list[nn.Module]:
        """Return every module once."""
        return list(self._names)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return every parameter once, under its first name: what `named_parameters` gives, in less time."""
        first: dict[int, tuple[str, nn.Parameter]] = {}
        for path, module in self.modules.items():
            for name, parameter in own_parameters(module).items():
                if parameter is not None and id(parameter) not in first:
                    first[id(parameter)] = (qualified(path, name), parameter)
        return dict(first.values())

    def registered(self, *, transient: bool = True) -> dict[str, Tensor]:
        """Return every parameter and buffer under each name, with `transient` ones that a state dict leaves out."""
        found: dict[str, Tensor] = {}
        for path, module in self.modules.items():
            prefix = f"{path}." if path else ""
            left_out = transient_buffers(module) if not transient and own_buffers(module) else ()
            for name, tensor in _registered(module).items():
                if tensor is not None and name not in left_out:
                    found[prefix + name] = tensor
        return found

    def state(self) -> dict[str, Tensor] | None:
        """Return what the model's state dict holds, itself; None where a module has its own way of making one."""
        return self.registered(transient=False) if all(map(_is_saved_plainly, self._names)) else None

    def relative(self, owner: str, module: nn.Module) -> str | None:
        """Return the name of `module` as seen from the module called `owner`, or None if it is not inside."""
        return next(self.all_relative(owner, module), None)

    def all_relative(self, owner: str, module: nn.Module) -> Iterator[str]:
        """Yield every name of `module` as seen from the module called `owner`."""
        prefix = f"{owner}." if owner else ""
        for name in self._names.get(module, ()):
            if name == owner:
                yield ""
            elif name.startswith(prefix):
                yield name[len(prefix) :]

    def tensors(self, owner: str) -> dict[int, str]:
        """Return id of a tensor -> its name as seen from `owner`: also those in plain attributes."""
        prefix = f"{owner}." if owner else ""
        found: dict[int, str] = {}
        for name, module in self.modules.items():
            if name == owner or name.startswith(prefix):
                inside = name[len(prefix) :] if name != owner else ""
                for key, tensor in _own_tensors(module).items():
                    found.setdefault(id(tensor), qualified(inside, key))
        return found


def qualified(owner: str, name: str) -> str:
    """Return what a model calls what the module called `owner` calls `name`; "" is the module itself."""
    return f"{owner}.{name}" if owner and name else owner or name


def _is_saved_plainly(module: nn.Module) -> bool:
    own = module.__dict__
    replaced = "state_dict" in own or "_save_to_state_dict" in own or "get_extra_state" in own
    return _has_plain_state(type(module)) and not replaced and not has_state_hooks(module)


@cached_by_class
def _has_plain_state(cls: type[nn.Module]) -> bool:
    return all(getattr(cls, name) is getattr(nn.Module, name) for name in _SAVING)


_SAVING = ("state_dict", "_save_to_state_dict", "get_extra_state")


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    attributes: dict[str, Any] = {**own_parameters(module), **own_buffers(module), **module.__dict__}
    return {name: value for name, value in attributes.items() if isinstance(value, Tensor)}
