"""Read what a module holds, past what its class or its users put before it: children, tensors, hooks, regions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.nn.modules.lazy import LazyModuleMixin

__all__ = [
    "BORROWED", "REGIONS", "REGISTERS", "all_modules", "children_of", "has_global_hooks", "has_hooks",
    "has_lazy_parameters", "has_pre_hooks", "has_state_hooks", "hook_registries", "hooks_of", "modules_by_name",
    "only_collects", "own_buffers", "own_children", "own_parameters", "own_tensor", "property_access", "read_by_name",
    "runs_hooks", "submodule", "tensor_at", "transient_buffers",
]  # fmt: skip


REGISTERS = ("_parameters", "_buffers")
"""The entries of a module's `__dict__` that hold its own parameters and buffers, by name."""


REGIONS = "_fxopt_regions"
"""In a module's `__dict__`: the names of its regions, which are plain attributes and no registered children."""


BORROWED = "_fxopt_borrowed"
"""In a region's `__dict__`: the names that its owner has for what it calls."""


has_global_hooks: Callable[[], Any] = _module._has_any_global_hook  # pyright: ignore[reportPrivateUsage]
"""Say whether there are hooks that run with every module's call."""


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Say whether calling the module runs hooks that the user registered."""
    return any(map(module.__dict__.__getitem__, _HOOKS))


_COLLECTING = "transformers.utils.output_capturing"


def only_collects(module: nn.Module) -> bool:
    """Say whether a module has hooks, all of them those that transformers itself leaves at layers: they do nothing but
    in a call that asks for hidden states or attentions.
    """
    hooks = hooks_of(module)
    return bool(hooks) and all(map(_collects, hooks))


def runs_hooks(registries: Iterable[Mapping[int, Any]]) -> bool:
    """Say whether any of some hooks does something in the present call; see `only_collects`."""
    hooks = [hook for registry in registries for hook in registry.values()]
    return bool(hooks) and (not all(map(_collects, hooks)) or _is_collecting())


def _collects(hook: Any) -> bool:
    return getattr(hook, "__module__", "") == _COLLECTING and getattr(hook, "__name__", "") == "output_capturing_hook"


def _is_collecting() -> bool:
    """Say whether the present call asks for what hooks collect; yes where the library does not tell."""
    collector = getattr(sys.modules.get(_COLLECTING), "_active_collector", None)
    return collector is None or bool(collector.get())


def has_lazy_parameters(module: nn.Module) -> bool:
    """Say whether a module has parameters whose shapes its first call is to tell."""
    return isinstance(module, LazyModuleMixin) and cast("Any", module).has_uninitialized_params()


def has_pre_hooks(module: nn.Module) -> bool:
    """Say whether calling the module runs hooks that may change its arguments first."""
    return bool(cast("Any", module)._forward_pre_hooks)


def has_state_hooks(module: nn.Module) -> bool:
    """Say whether the module has hooks that may change what its state dict holds."""
    return bool(module.__dict__["_state_dict_hooks"] or module.__dict__["_state_dict_pre_hooks"])


def hook_registries(*modules: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return what holds the hooks that run with calls of modules, with every module's first; these stay the same."""
    of_all = (getattr(_module, f"_global{name}") for name in _HOOKS)
    return (*of_all, *(vars(module)[name] for module in modules for name in _HOOKS))


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks that calling the module runs, and those of its gradients."""
    return [hook for name in _HOOKS for hook in module.__dict__[name].values()]


def modules_by_name(module: nn.Module, *, every_name: bool = False) -> dict[str, nn.Module]:
    """Return the modules of a tree, regions too, by qualified name, each once or under every name."""
    found: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()
    pending = [("", module)]
    while pending:
        name, inner = pending.pop()
        if every_name or inner not in seen:
            seen.add(inner)
            found[name] = inner
            prefix = f"{name}." if name else ""
            pending += [
                (prefix + last, each) for last, each in reversed(children_of(inner).items()) if each is not None
            ]
    return found


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Return every module of `model` once, itself first: `model.modules()` and regions, at a tenth of its cost."""
    found: dict[nn.Module, None] = {model: None}
    pending = [model]
    for module in pending:
        for child in children_of(module).values():
            if child is not None and child not in found:
                found[child] = None
                pending.append(child)
    return pending


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's children and its regions by name; of a region, what it calls of its owner's."""
    attributes, found = module.__dict__, module._modules  # pyright: ignore[reportPrivateUsage]
    if BORROWED in attributes:
        found = {path: submodule(module, path) for path in attributes[BORROWED]}
    return {**found, **{name: attributes[name] for name in attributes[REGIONS]}} if REGIONS in attributes else found


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the registry itself of a module's own buffers, in which a name may stand for none."""
    return module._buffers  # pyright: ignore[reportPrivateUsage]


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the registry itself of a module's children."""
    return module._modules  # pyright: ignore[reportPrivateUsage]


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the registry itself of a module's own parameters."""
    return module._parameters  # pyright: ignore[reportPrivateUsage]


def own_tensor(module: nn.Module, name: str) -> Tensor | None:
    """Return a module's own parameter or buffer of a name, or None: `getattr`, which calls Python, at half its cost."""
    parameter = module._parameters.get(name)  # pyright: ignore[reportPrivateUsage]
    return module._buffers.get(name) if parameter is None else parameter  # pyright: ignore[reportPrivateUsage]


def read_by_name() -> dict[str, property]:
    """Return what makes a recurrent layer read its weights by their names, in the place of the list that it keeps."""
    return {"_flat_weights": property(_weights_by_name, lambda layer, value: None)}


def _weights_by_name(layer: nn.Module) -> list[Any]:
    return [getattr(layer, name, None) for name in vars(layer).get("_flat_weights_names", ())]


def submodule(module: nn.Module, path: str) -> nn.Module | None:
    """Return the module at a dotted path, or None; analyses ask for thousands, which `get_submodule` is slow for."""
    found: nn.Module | None = module
    for part in path.split(".") if path else ():
        attributes, children = found.__dict__, found._modules  # pyright: ignore[reportPrivateUsage]
        found = children.get(part)
        if found is None and part in attributes.get(REGIONS, ()):
            found = attributes[part]
        if found is None:
            return None
    return found


def tensor_at(module: nn.Module, path: str) -> Tensor | None:
    """Return the parameter or buffer at a dotted path, or None."""
    parent, _, name = path.rpartition(".")
    holder = submodule(module, parent)
    return None if holder is None else own_tensor(holder, name)


def property_access() -> type:
    """Return the type of what a torch function mode is given for a read or write of a tensor's property."""
    return cast("type[object]", type(getattr(Tensor.shape, "__get__")))  # noqa: B009  it is not declared


def transient_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that its state dict leaves out."""
    return module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
