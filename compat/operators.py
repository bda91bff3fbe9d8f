"""What torch does where operators of our own, and those without second gradients, are called: private names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, reduce
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._library import autograd as _library_autograd

__all__ = [
    "answer_instead", "flash_on_cpu_arguments", "is_flash_on_cpu", "is_recorded", "numbers_of", "register_promotion",
    "written_arguments",
]  # fmt: skip

_native: Any = cast("Any", torch)._C
_AUTOGRAD = _native.DispatchKey.AutogradCPU
_is_excluded = _native._dispatch_tls_is_dispatch_key_excluded


def answer_instead(definition: Any, plain: Callable[..., Any], is_asked: Callable[[], bool]) -> None:
    """Let the operations of `plain` answer for an operator when `is_asked` says so, before its gradient is asked."""
    usual = cast("Any", _library_autograd).make_autograd_impl(definition._opoverload, definition)

    def chosen(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs) if is_asked() else usual(keyset, *args, **kwargs)

    with warnings.catch_warnings():  # torch warns of what is registered twice
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        definition._lib.impl(definition._name, chosen, "Autograd", with_keyset=True)


def numbers_of(tensor: Tensor) -> Any:
    """Return the numbers of a tensor, of one that `torch.func.grad` wraps, too; what `vmap` wraps has several."""
    while _native._functorch.is_gradtrackingtensor(tensor):
        tensor = _native._functorch.get_unwrapped(tensor)
    with temporarily_clear_interpreter_stack():  # else it would be wrapped again
        return tensor.detach().cpu().numpy()


def register_promotion(definition: Any, device: str) -> None:
    """Let floating-point operands of an operator take the widest dtype of theirs where autocast is on."""
    key = getattr(_native.DispatchKey, "Autocast" + _native._dispatch_key_for_device(device))
    excluded = _native.DispatchKeySet(key)

    def promoted(_: Any, *args: Any) -> Any:
        with _native._ExcludeDispatchKeyGuard(excluded):
            return definition._opoverload(*_as_one(args))

    definition._lib.impl(definition._name, promoted, key.name, with_keyset=True)


def _as_one(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments whose floating-point tensors, those in lists too, have the widest dtype of theirs."""
    flat = [each for arg in args for each in (cast("list[Any]", arg) if isinstance(arg, list) else [arg])]
    dtypes = {each.dtype for each in flat if isinstance(each, Tensor) and each.is_floating_point()}
    if len(dtypes) < 2:
        return args
    widest = reduce(torch.promote_types, dtypes)

    def cast_one(value: Any) -> Any:
        if isinstance(value, list):
            return [cast_one(each) for each in cast("list[Any]", value)]
        return value.to(widest) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(cast_one(arg) for arg in args)


_choice = cast("Any", torch)._fused_sdp_choice
_FLASH = _native._SDPBackend.FLASH_ATTENTION


def is_flash_on_cpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Say whether torch computes attention on a CPU by its fast kernel, whose gradient has no gradient."""
    return _choice(query, key, value, mask, 0.0, is_causal) == _FLASH.value


def flash_on_cpu_arguments() -> tuple[list[Tensor], Tensor | None, bool, float | None]:
    """Return the queries, keys and values, mask, and settings of the attention whose gradient is being computed."""
    node = _native._current_autograd_node()
    given = [node._saved_query, node._saved_key, node._saved_value]
    return given, node._saved_attn_mask, node._saved_is_causal, node._saved_scale


def is_recorded() -> bool:
    """Say whether gradients may be taken through operations here, unlike inside of an operator that has its own."""
    return torch.is_grad_enabled() and not _is_excluded(_AUTOGRAD)


@cache
def written_arguments(operator: Any) -> frozenset[int | str]:
    """Return the positions and the names of the arguments that a dispatched operator writes into."""
    arguments = enumerate(operator._schema.arguments)
    written = [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return frozenset(key for pair in written for key in pair)
