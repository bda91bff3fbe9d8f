"""Modules some of whose weights are zero and stay zero, whatever an optimizer, a user or a checkpoint writes there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...compat import is_plainly_eager, own_parameters, read_by_name
from ...errors import UsageError
from ...operators import Cache
from ...runtime.graphs import capture_of, install, uninstall
from ...runtime.state import STATE_MAP, sharded_like
from ...runtime.values import Remade, class_recipe, in_class, subclass, user_class
from ..members import seal
from ..steps import after_steps
from ..views import sealed_names
from .semi_structured import forget_packed, forget_sparse, sparse_linear

__all__ = ["Masked", "gone_attribute", "gone_of", "has_only_masks", "masked_module", "set_gone", "unmask"]

_GONE = "_fxopt_gone"
"""In the `__dict__` of a module with masks: name of a parameter -> which of its elements are zero for good."""

_SETTLED = "_fxopt_settled"
"""Likewise -> what knows whether zeros were put there since it was last written to; it is no change of the module."""

_REPLICATED = "_fxopt_replicated"
"""In that of a replica of one: name of a parameter -> what the replica computes with."""


class Masked(Remade):
    """A module of its own class, whose masked parameters read as zero where their masks say so.
    Reading puts zeros back; within the forward it gives a view, whose gradient is zero there. The masks are no
    buffers: state dicts know nothing of them. What takes a masked parameter out of its place is refused.
    """

    _fxopt_is_operation: ClassVar[bool] = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        computed = cast("Any", super()).forward
        if torch.compiler.is_compiling():
            return computed(*args, **kwargs)
        _forwards.depth += 1
        try:
            sparse = None if kwargs else sparse_linear(cast("nn.Module", self), args)
            return computed(*args, **kwargs) if sparse is None else sparse
        finally:
            _forwards.depth -= 1

    def train(self, mode: bool = True) -> Any:
        """Set the mode; zeros are put back at the next reading, and packed weights are made anew."""
        _forget(cast("nn.Module", self))
        return cast("Any", super()).train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the masks along with the parameters: each reading would copy them to their device."""
        moved = cast("Any", super())._apply(fn, recurse)
        _move_masks(cast("nn.Module", self))
        return moved

    def __delattr__(self, name: str) -> None:
        if name in gone_of(cast("nn.Module", self)):
            raise _refusal(self, name)
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        masked, _, part = name.rpartition("_")
        if part in _PARTS and masked in gone_of(cast("nn.Module", self)):  # the weight is to be made of these
            _put_back(cast("nn.Module", self), masked)
            raise _refusal(self, masked)
        cast("Any", super()).register_parameter(name, param)


_PARTS = ("orig", "g", "v")
"""What torch's pruning, spectral norm and weight norm add to a parameter's name; `_reverse` is of a name itself."""


def _put_back(module: nn.Module, name: str) -> None:
    """Put a parameter back that was taken out of the registry itself, as `torch.nn.utils.weight_norm` does."""
    registered = own_parameters(module)
    parameter = cast("dict[str, Cache]", vars(module)[_SETTLED])[name].last()
    if name not in registered and isinstance(parameter, nn.Parameter):
        others = dict(registered)
        registered.clear()
        registered.update({name: parameter, **others})


def _refusal(module: object, name: str) -> UsageError:
    return UsageError(
        f"'{name}' of this {type(module).__name__} is masked, and must stay its parameter; take the masks off first: "
        "fxopt.transforms.prune.remove_masks(model)"
    )


class _Forwards(threading.local):
    """How many forwards of modules with masks this thread is in."""

    depth = 0


_forwards = _Forwards()


def masked_module(module: nn.Module, gone: Mapping[str, Tensor]) -> nn.Module:
    """Return a module of the same class and tensors, with `gone`, by name, as the masks of its parameters."""
    new = in_class(module, type(module))
    uninstall(new)
    object.__setattr__(new, "__class__", _masked_class(user_class(type(module)), tuple(gone)))
    set_gone(new, gone)
    return new


def gone_of(module: nn.Module) -> Mapping[str, Tensor]:
    """Return name of a parameter -> which of its elements are zero for good; of other modules nothing."""
    return vars(module).get(_GONE, {})


def _move_masks(module: nn.Module) -> None:
    """Put the masks where the parameters are; the meta device has no values to keep."""
    registered, known = own_parameters(module), gone_of(module)
    there = {name: each.device for name, each in registered.items() if each is not None and not each.is_meta}
    if any(flags.device != there.get(name, flags.device) for name, flags in known.items()):
        vars(module)[_GONE] = {name: flags.to(there.get(name, flags.device)) for name, flags in known.items()}


def gone_attribute(name: str) -> str:
    """Return the attribute that says which elements of a parameter are zero; false without masks."""
    return f"_fxopt_gone_{name}"


def has_only_masks(module: nn.Module) -> bool:
    """Say whether a module is of its user's class but for masks: nothing else was put around it."""
    return type(module) is _masked_class(user_class(type(module)), tuple(gone_of(module)))


def set_gone(module: nn.Module, gone: Mapping[str, Tensor]) -> None:
    """Give a module with masks other ones; the zeros are there at the next reading."""
    forget_sparse(module)  # it was for other masks
    vars(module)[_GONE] = dict(gone)
    vars(module)[_SETTLED] = {name: Cache() for name in gone}


def _masked_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    return subclass(base, (Masked,), lambda: _body(base, names), key=("masked", names))


def _body(base: type[nn.Module], names: tuple[str, ...]) -> dict[str, Any]:
    return {
        "_fxopt_base": user_class(base),
        "_fxopt_recipe": (_remade, (*class_recipe(base), names)),
        **{name: _reading(name) for name in names},
        **{gone_attribute(name): _reading_gone(name) for name in names},
        **(read_by_name() if issubclass(base, nn.RNNBase) else {}),
    }


def _remade(
    make: Callable[..., type[nn.Module]], arguments: tuple[Any, ...], names: tuple[str, ...]
) -> type[nn.Module]:
    """Return the class again, whose base may be one that was made on the fly, too."""
    return _masked_class(make(*arguments), names)


def _reading(name: str) -> property:
    return property(lambda module: _read(module, name), lambda module, value: _replicate(module, name, value))


def _replicate(module: nn.Module, name: str, value: Tensor) -> None:
    """Give a replica, as `DataParallel` makes one for each device, a copy of a parameter, which is a plain tensor."""
    if not vars(module).get("_is_replica"):
        raise _refusal(module, name)
    vars(module)[_REPLICATED] = {**vars(module).get(_REPLICATED, {}), name: value}


def _reading_gone(name: str) -> property:
    def read(module: nn.Module) -> Tensor:
        parameter = getattr(module, name)  # puts the zeros there: a graph reads the parameter past the module
        return _beside(module, name, parameter)

    return property(read)


def _read(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter with its zeros in place."""
    registered = cast("Mapping[str, Tensor | None]", vars(module)["_parameters"])
    if name not in registered:
        replicated: Tensor | None = vars(module).get(_REPLICATED, {}).get(name)
        if replicated is None:
            raise AttributeError(name)  # nn.Module looks elsewhere, and says what is missing
        return replicated.masked_fill(_beside(module, name, replicated), 0)
    parameter = registered[name]
    if parameter is None:
        return None
    gone = _beside(module, name, parameter)
    is_own = type(parameter) is nn.Parameter and not (parameter.is_meta or torch.compiler.is_compiling())
    is_plain = is_own and is_plainly_eager()
    if is_plain:
        _settle(module, name, parameter, gone)
    if not (_forwards.depth or torch.compiler.is_compiling()):
        return parameter
    if not (is_plain or (is_own and is_plainly_eager(watched=True))):
        return parameter.masked_fill(gone, 0)
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter if is_plain else parameter.masked_fill(gone, 0)
    return cast("Tensor", _Kept.apply(parameter, gone, is_plain, module))


class _Kept(torch.autograd.Function):
    """A parameter whose gradient is zero where its mask says so: in training, and where verification looks on."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gone: Tensor, is_settled: bool, module: nn.Module) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.gone, ctx.module = gone, module
        return parameter.view_as(parameter) if is_settled else parameter.masked_fill(gone, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _forget(ctx.module)  # an optimizer may step now, and torch does not count the writes of fused ones
        return _without(ctx.gone, gradient), None, None, None


def _without(gone: Tensor, gradient: Tensor) -> Tensor:
    return gradient.masked_fill(gone, 0)


def _beside(module: nn.Module, name: str, parameter: Tensor) -> Tensor:
    """Return the mask where the parameter is: on its device, cut as it is."""
    gone: Tensor = vars(module)[_GONE][name]
    return sharded_like(gone if gone.device == parameter.device else gone.to(parameter.device), parameter)


def _forget(module: nn.Module) -> None:
    """Let everything be made anew that follows from the values of a module's parameters."""
    for settled in cast("dict[str, Cache]", vars(module).get(_SETTLED, {})).values():
        settled.forget()
    forget_packed(module)


def _settle(module: nn.Module, name: str, parameter: Tensor, gone: Tensor) -> None:
    """Put the zeros back where anything was written to a parameter since that was last done."""

    def settle(written: Tensor) -> Tensor:
        if written.requires_grad:
            after_steps(module, _put_zeros_back)
        # Not counted as a write: backward passes that are under way saved the same values.
        written.data.masked_fill_(gone, 0)
        return written

    cast("dict[str, Cache]", vars(module)[_SETTLED])[name].of(settle, parameter)


def _put_zeros_back(module: nn.Module) -> None:
    """Let averages and logs read zeros behind a step; torch does not count the writes of fused optimizers."""
    _forget(module)
    for name in gone_of(module):
        getattr(module, name)


def unmask(module: nn.Module) -> None:
    """Take the masks off a module; the zeros stay as values, and can be trained away."""
    for name in gone_of(module):
        getattr(module, name)  # puts the zeros there
    names, capture = list(gone_of(module)), capture_of(module)
    uninstall(module, keep_regions=True)
    object.__setattr__(module, "__class__", user_class(type(module)))
    for key in (_GONE, _SETTLED, STATE_MAP):
        vars(module).pop(key, None)
    forget_sparse(module)
    if sealed_names(module):  # a graph computes with its tensors
        seal(module, ())
        vars(module).update((gone_attribute(name), torch.zeros((), dtype=torch.bool)) for name in names)
    if capture is not None:
        install(module, capture)
