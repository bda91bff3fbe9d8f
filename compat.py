"""Every private or version-dependent torch API that fxopt uses, one small function each, in alphabetical order.

Those of one subject are beside it, in `compat_*.py`. What torch leaves untyped and fxopt calls in several places
is here, too, with its types.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.graph import inplace_methods, magic_methods
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import _has_any_global_hook  # pyright: ignore[reportPrivateUsage]
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "BORROWED",
    "REGIONS",
    "REGISTERS",
    "DispatchMode",
    "all_modules",
    "autocast_dtype",
    "autocast_settings",
    "children_of",
    "cpu_capabilities",
    "draws_randomly",
    "fake_tensors",
    "has_global_hooks",
    "has_hooks",
    "has_lazy_parameters",
    "has_pre_hooks",
    "has_state_hooks",
    "hooks_of",
    "in_place_format",
    "is_autocast",
    "is_cast_by_autocast",
    "is_plainly_eager",
    "is_registered_operator",
    "is_torch_wrapper",
    "is_transformed",
    "is_view_operator",
    "modules_by_name",
    "native_functions",
    "operator_format",
    "operator_name",
    "overloads_of",
    "own_buffers",
    "own_children",
    "own_parameters",
    "own_tensor",
    "padding_around",
    "property_access",
    "read_by_name",
    "runs_kernels",
    "storage_id",
    "submodule",
    "tensor_hooks",
    "torch_functions_off",
    "transient_buffers",
    "version_of",
    "wants_gradients",
]


REGISTERS = ("_parameters", "_buffers")
"""The entries of a module's `__dict__` that hold its own parameters and buffers, by name."""
REGIONS = "_fxopt_regions"
"""In a module's `__dict__`: the names of its regions, which are plain attributes and no registered children."""
BORROWED = "_fxopt_borrowed"
"""In a region's `__dict__`: the names that its owner has for what it calls."""

has_global_hooks: Callable[[], Any] = _has_any_global_hook
"""Say whether there are hooks that run with every module's call."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does not import `torch._dynamo` (more than a second) on its first operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which autocast hands a tensor to products."""
    return torch.get_autocast_dtype(tensor.device.type) if is_cast_by_autocast(tensor) else tensor.dtype


def autocast_settings(context: torch.autocast) -> dict[str, Any]:
    """Return what a `torch.autocast` was made with, as its arguments."""
    own = vars(context)
    return {
        "device_type": own["device"],
        "dtype": own["fast_dtype"],
        "enabled": own["_enabled"],
        "cache_enabled": own["_cache_enabled"],
    }


def cpu_capabilities() -> Mapping[str, object]:
    """Return which instructions this CPU has, by name; nothing where torch does not tell."""
    return getattr(torch.cpu, "get_capabilities", dict[str, object])()


def draws_randomly(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Say whether a call of a dispatched operator draws from a random generator; attention without dropout does not."""
    if not _is_tagged_random(operator):
        return False
    position = _dropout_position(operator)
    if position is None:
        return True
    given = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
    return given != 0.0


@cache
def _is_tagged_random(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags


@cache
def _dropout_position(operator: Any) -> int | None:
    names = [argument.name for argument in operator._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


@contextmanager
def fake_tensors() -> Generator[Any]:
    """Enter a mode in which tensors hold no data; real ones that meet them are taken as fake.

    Whoever runs code on fake tensors knows that it may fail: torch does not log it meanwhile.
    """
    from torch._subclasses import fake_tensor  # a quarter of a second

    level = fake_tensor.log.level
    fake_tensor.log.setLevel("CRITICAL")
    try:
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        fake_tensor.log.setLevel(level)


def has_hooks(module: nn.Module) -> bool:
    """Say whether calling the module runs hooks that the user registered."""
    return any(map(module.__dict__.__getitem__, _HOOKS))


def has_lazy_parameters(module: nn.Module) -> bool:
    """Say whether a module has parameters whose shapes its first call is to tell."""
    return isinstance(module, LazyModuleMixin) and cast("Any", module).has_uninitialized_params()


def has_pre_hooks(module: nn.Module) -> bool:
    """Say whether calling the module runs hooks that may change its arguments first."""
    return bool(cast("Any", module)._forward_pre_hooks)


def has_state_hooks(module: nn.Module) -> bool:
    """Say whether the module has hooks that may change what its state dict holds."""
    return bool(module.__dict__["_state_dict_hooks"] or module.__dict__["_state_dict_pre_hooks"])


def tensor_hooks(tensor: Tensor) -> list[tuple[str, Callable[..., Any]]]:
    """Return the hooks on a tensor's gradient, each with the name of the method that registers it."""
    any_: Any = tensor
    before: dict[int, Callable[..., Any]] = any_._backward_hooks or {}
    after: dict[int, Callable[..., Any]] = any_._post_accumulate_grad_hooks or {}
    on_gradient = [("register_hook", hook) for hook in before.values()]
    return on_gradient + [("register_post_accumulate_grad_hook", hook) for hook in after.values()]


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks that calling the module runs, and those of its gradients."""
    return [hook for name in _HOOKS for hook in module.__dict__[name].values()]


def in_place_format(function: Any) -> str | None:
    """Return how a function of the `operator` module that changes its argument is written ("{} += {}"), or None."""
    if getattr(function, "__module__", None) != "_operator":
        return None
    return inplace_methods.get(function.__name__)


def is_autocast(tensor: Tensor) -> bool:
    """Say whether autocast is on for the device of a tensor."""
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def is_cast_by_autocast(tensor: Tensor) -> bool:
    """Say whether autocast, which leaves float64 and integers alone, casts a tensor."""
    return is_autocast(tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64


_native: Any = cast("Any", torch)._C
_dispatch_modes, _function_modes = _native._len_torch_dispatch_stack, _native._len_torch_function_stack
_forward_ad, _is_cast = cast("Any", forward_ad), _native._is_any_autocast_enabled
_is_compiling = torch.compiler.is_compiling
_is_tracing, _transform = _native._is_tracing, _native._functorch.peek_interpreter_stack


def wants_gradients(*tensors: Tensor | None) -> bool:
    """Say whether autograd records what is computed from these: the gradient of one of them may be asked for."""
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def is_plainly_eager(*, watched: bool = False) -> bool:
    """Say whether operations run as they are called; `watched` lets dispatch modes be there, if torch's own do not."""
    if _dispatch_modes():  # how many there are is quickly asked
        seen: list[Any] = python_dispatch._get_current_dispatch_mode_stack()  # pyright: ignore[reportPrivateUsage]
        if not watched or any(hasattr(mode, "_mode_key") for mode in seen):
            return False
    if _function_modes():
        modes: list[Any] = torch.overrides._get_current_function_mode_stack()  # pyright: ignore[reportPrivateUsage]
        if {type(mode) for mode in modes} - {DeviceContext}:
            return False
    return not _is_tracing() and not is_transformed()


def is_transformed() -> bool:
    """Say whether a transform of `torch.func`, or forward-mode differentiation, asks operations for their rules."""
    return _transform() is not None or _forward_ad._current_level >= 0


def is_registered_operator(function: Any) -> bool:
    """Say whether a function is one of `torch.ops`."""
    return isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))  # pyright: ignore[reportPrivateUsage]


def is_torch_wrapper(cls: type) -> bool:
    """Say whether a class is a wrapper of torch around the user's module: compiled, replicated or sharded."""
    return cls.__module__.startswith(("torch._dynamo", "torch.distributed"))


@cache
def is_view_operator(operator: Any) -> bool:
    """Say whether a dispatched operator's result always shares its argument's storage.

    `lift_fresh` yields a new tensor, and `to` does where it converts one.
    """
    return operator.is_view and operator.overloadpacket not in (torch.ops.aten.lift_fresh, torch.ops.aten.to)


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


def native_functions() -> Any:
    """Return the module that holds what `F.linear`, `F.gelu` and others really are."""
    return getattr(torch._C, "_nn")  # pyright: ignore[reportPrivateUsage]  # noqa: B009  it is not declared


def operator_format(function: Any) -> str | None:
    """Return how a function of the `operator` module is written with its symbol ("{} + {}"), or None."""
    if getattr(function, "__module__", None) != "_operator":
        return None
    return magic_methods.get(function.__name__)


def operator_name(function: Any) -> str | None:
    """Return the name of one of `torch.ops` ("aten::add"), which all of its overloads share; None for anything else."""
    if not is_registered_operator(function):
        return None
    return getattr(function, "overloadpacket", function)._qualified_op_name


def overloads_of(operator: Any) -> list[tuple[Any, Any]]:
    """Return each overload of one of `torch.ops` with its schema; an overload is its own only one."""
    single = not hasattr(operator, "overloads")
    found: list[Any] = [operator] if single else [getattr(operator, name) for name in operator.overloads()]
    return [(overload, overload._schema) for overload in found]


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
    return {"_flat_weights": property(lambda m: [getattr(m, n) for n in m._flat_weights_names], lambda m, value: None)}


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


def padding_around(convolution: Any) -> list[int]:
    """Return what a convolution pads its input with itself, as `torch.nn.functional.pad` takes it."""
    return list(convolution._reversed_padding_repeated_twice)


def property_access() -> type:
    """Return the type of what a torch function mode is given for a read or write of a tensor's property."""
    return cast("type[object]", type(getattr(Tensor.shape, "__get__")))  # noqa: B009  it is not declared


def runs_kernels() -> bool:
    """Say whether operators without gradients and autocast may run: `is_plainly_eager`, and none of these."""
    return not (_is_compiling() or _is_cast()) and is_plainly_eager()


def storage_id(tensor: Tensor) -> int:
    """Return what tells a tensor's memory from others'.

    Raises:
        NotImplementedError: for a tensor without memory of its own (a sparse one).
    """
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def torch_functions_off() -> AbstractContextManager[None]:
    """Let torch functions and properties act on tensors directly, past every mode and override."""
    return torch._C.DisableTorchFunction()  # pyright: ignore[reportPrivateUsage]


def transient_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that its state dict leaves out."""
    return module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]


version_of: Callable[[Tensor], int] = operator.attrgetter("_version")
"""Return how often a tensor has been changed in place; no function of Python's, which would take twice the time."""
