"""Ask of tensors, operators and the state of torch what has no public question."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.graph import inplace_methods, magic_methods
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "COMPARED", "SAME_MEMORY", "SAME_VERSION", "DispatchMode", "autocast_dtype", "autocast_settings",
    "cpu_capabilities", "draws_randomly", "fake_tensors", "holders_of", "in_place_format", "is_autocast",
    "is_cast_by_autocast", "is_plainly_eager", "is_registered_operator", "is_torch_wrapper", "is_transformed",
    "is_view_operator", "native_functions", "operator_format", "operator_name", "overloads_of", "padding_around",
    "runs_kernels", "same_memory", "storage_id", "tensor_hooks", "torch_functions_off", "version_of",
    "wants_gradients",
]  # fmt: skip


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
    """Enter a mode in which tensors hold no data, and real ones are taken as fake; torch logs no failure meanwhile."""
    from torch._subclasses import fake_tensor  # a quarter of a second

    level = fake_tensor.log.level
    fake_tensor.log.setLevel("CRITICAL")
    try:
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        fake_tensor.log.setLevel(level)


def tensor_hooks(tensor: Tensor) -> list[tuple[str, Callable[..., Any]]]:
    """Return the hooks on a tensor's gradient, each with the name of the method that registers it."""
    any_: Any = tensor
    before: dict[int, Callable[..., Any]] = any_._backward_hooks or {}
    after: dict[int, Callable[..., Any]] = any_._post_accumulate_grad_hooks or {}
    on_gradient = [("register_hook", hook) for hook in before.values()]
    return on_gradient + [("register_post_accumulate_grad_hook", hook) for hook in after.values()]


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


def same_memory(x: Tensor) -> Tensor:
    """Return a tensor in the memory of another that is no view for autograd, which restricts writing into views."""
    return torch.ops.aten._unsafe_view(x, x.shape)


def is_registered_operator(function: Any) -> bool:
    """Say whether a function is one of `torch.ops`."""
    return isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))  # pyright: ignore[reportPrivateUsage]


def is_torch_wrapper(cls: type) -> bool:
    """Say whether a class is a wrapper of torch around the user's module: compiled, replicated or sharded."""
    return cls.__module__.startswith(("torch._dynamo", "torch.distributed"))


@cache
def is_view_operator(operator: Any) -> bool:
    """Say whether a dispatched operator's result always shares its argument's storage; that of `to` may not."""
    return operator.is_view and operator.overloadpacket not in (torch.ops.aten.lift_fresh, torch.ops.aten.to)


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


def padding_around(convolution: Any) -> list[int]:
    """Return what a convolution pads its input with itself, as `torch.nn.functional.pad` takes it."""
    return list(convolution._reversed_padding_repeated_twice)


def runs_kernels() -> bool:
    """Say whether operators without gradients and autocast may run: `is_plainly_eager`, and none of these."""
    return not (_is_compiling() or _is_cast()) and is_plainly_eager()


def storage_id(tensor: Tensor) -> int:
    """Return what tells a tensor's memory from others'; raise a NotImplementedError for one without (a sparse one)."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def dispatch_modes_off() -> AbstractContextManager[None]:
    """Let operations run past every dispatch mode: under one, `torch.jit.trace` takes results for constants."""
    return cast("Any", python_dispatch)._disable_current_modes()


def torch_functions_off() -> AbstractContextManager[None]:
    """Let torch functions and properties act on tensors directly, past every mode and override."""
    return torch._C.DisableTorchFunction()  # pyright: ignore[reportPrivateUsage]


version_of: Callable[[Tensor], int] = operator.attrgetter("_version")
"""Return how often a tensor has been changed in place; no function of Python's, which would take twice the time."""


SAME_VERSION = "x{i}._version == version{i}"
"""In generated code: a tensor was written to as often as before."""

SAME_MEMORY = "x{i}.data_ptr() == place{i} and x{i}.numel() == number{i} and x{i}.stride() == strides{i}"
"""In generated code: its memory is there, and is read the same way."""

COMPARED: tuple[Callable[[Tensor], Any], ...] = (
    cast("Any", Tensor)._version.__get__, Tensor.data_ptr, Tensor.numel, Tensor.stride,
)  # fmt: skip
"""The same for `map`, over many tensors."""


def holders_of(tensor: Tensor) -> int:
    """Return how many tensors share a tensor's memory, itself among them."""
    storage = tensor.untyped_storage()
    return cast("Any", torch)._C._storage_Use_Count(storage._cdata) - 1  # pyright: ignore[reportPrivateUsage]
