"""The class of modules inside a fused ensemble: members whose parameters live elsewhere, and the containers above them.
It is made from the user's class, and reads `_fxopt_views`, name -> `View`, and `_fxopt_sealed`, the children that must
stay, and of a module that is not called any more its `forward` and settings, from a module's `__dict__`.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..compat import own_parameters, own_tensor, read_by_name, version_of
from ..errors import FusedMemberError
from ..operators.cache import Cache
from ..runtime.graphs import Captured, this_call
from ..runtime.state import VIEWS
from ..runtime.values import class_recipe, empty_module, remade_by, subclass, user_class
from .saving import SavesSlices
from .slices import ADVICE, View, by_member, check_plain, frozen_alone, slices_in
from .views import (
    SEALED,
    can_be_independent,
    make_independent,
    outside_views,
    parameters_among,
    sealed_names,
    slices_alone,
    stacked_or_slices,
    stores_among,
    views_of,
)

__all__ = ["FUSED_FROM", "FusedPart", "fused_class"]

FUSED_FROM = "_fxopt_fused_from"

_KEPT = "_fxopt_slices"
"""In the `__dict__` of a module that holds stacked parameters: slices that are kept between calls."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_MUTATORS = (
    "__delitem__", "__iadd__", "__imul__", "__setitem__", "append", "clear", "extend", "insert", "pop", "update",
)  # fmt: skip


def _hook_registration(name: str) -> Callable[..., Any]:
    """Return a method that registers a hook, unless the module's original forward is not run any more."""

    def register(self: FusedPart, *args: Any, **kwargs: Any) -> Any:
        if "forward" in sealed_names(self):
            raise _refusal(self, "it is not called by itself, so a hook would never run")
        return getattr(super(FusedPart, self), name)(*args, **kwargs)

    return register


class _Whole:
    """What is applied to the tensors of a module that holds all of an ensemble; members inside are no exception."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, tensor: Tensor) -> Tensor:
        return self.function(tensor)


class FusedPart(SavesSlices):
    """Mix into the class of a module inside a fused ensemble.
    A member's parameters read as slices of the stacked ones, and writing to them writes there; asked directly, it
    lists, saves and loads them as its own. What would cut the tree loose from the computation raises
    `FusedMemberError`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self, Captured):
            # Someone called type(member)(...): a new module, of the user's class, that is part of nothing.
            self.__class__ = cast("Any", user_class(type(self)))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the user's own hook for subclasses (registries, say) from seeing the classes made here."""

    def __reduce__(self) -> tuple[Any, ...]:
        return empty_module, class_recipe(type(self)), self.__getstate__()

    # -- what a member is made of ----------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        view = views_of(self).get(name)
        if view is not None:
            self._fxopt_write(name, view, value)
            return
        sealed = sealed_names(self)
        if name == "__class__" and name in sealed:
            raise _refusal(self, "its class cannot be replaced")
        if name in sealed and self._modules.get(name, self.__dict__.get(name)) is not value:
            raise _refusal(self, f"'{name}' cannot be replaced")
        if sealed and name not in sealed and isinstance(value, nn.Module) and isinstance(self, _CONTAINERS):
            raise _refusal(self, f"'{name}' cannot be added")
        if _loses_tensor(self, name, value):
            raise _refusal(self, f"'{name}' cannot become None")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in views_of(self) or name in sealed_names(self):
            raise _refusal(self, f"'{name}' cannot be deleted")
        super().__delattr__(name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        sealed = sealed_names(self)
        if name in sealed or (sealed and isinstance(self, _CONTAINERS)):
            raise _refusal(self, f"'{name}' cannot be {'replaced' if name in sealed else 'added'}")
        super().add_module(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        views = views_of(self)
        if name in views:
            self._fxopt_write(name, views[name], param)
        elif views or ("forward" in sealed_names(self) and own_tensor(self, name) is None):
            raise _refusal(self, f"the parameter '{name}' cannot be added (by pruning or a normalization, say)")
        elif _loses_tensor(self, name, param):
            raise _refusal(self, f"'{name}' cannot become None")
        else:
            super().register_parameter(name, param)

    register_forward_hook = _hook_registration("register_forward_hook")
    register_forward_pre_hook = _hook_registration("register_forward_pre_hook")
    register_backward_hook = _hook_registration("register_backward_hook")
    register_full_backward_hook = _hook_registration("register_full_backward_hook")
    register_full_backward_pre_hook = _hook_registration("register_full_backward_pre_hook")

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        if any(part.requires_grad != requires_grad for part in slices_in(self.parameters())):
            frozen_alone(f"this {type(self).__name__}")
        return super().requires_grad_(requires_grad)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or convert the stacked tensors with what holds all members; a part of them cannot be moved."""
        views = {} if isinstance(fn, _Whole) else outside_views(self)
        for store in stores_among(views):
            cast("Any", store)._apply(fn)
        for name, view in slices_alone(views).items():
            mine = view.read().detach()
            moved = fn(mine)
            if (moved.dtype, moved.device) != (mine.dtype, mine.device):
                raise _refusal(self, f"'{name}' is of one member, which cannot be moved or converted by itself")
        return super()._apply(cast("Any", fn if isinstance(fn, _Whole) else _Whole(fn)), recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy; of a member that is asked directly, an independent module with parameters of its own."""
        # Members among other things are copied one by one: the memo then holds these.
        alone = not memo and can_be_independent(self)
        if alone:
            memo.update({id(view.store): view.store for view in outside_views(self).values()})
        of_class = getattr(super(), "__deepcopy__", None)
        if of_class is not None and not alone:
            return of_class(memo)
        make, arguments, state = self.__reduce__()
        memo[id(self)] = copied = make(*arguments)
        copied.__setstate__(copy.deepcopy(state, memo))
        if alone:
            make_independent(copied)
        return copied

    def _replicate_for_data_parallel(self) -> Any:
        replica: Any = super()._replicate_for_data_parallel()
        # The children of a replica are replicas, too.
        replica.__dict__.pop(SEALED, None)
        return replica

    def _fxopt_write(self, name: str, view: View, value: object) -> None:
        if not isinstance(value, Tensor):
            raise _refusal(self, f"'{name}' cannot become {value!r}")
        what = f"'{name}' of this {type(self).__name__}"
        check_plain(value, what)
        if not isinstance(value, nn.Parameter):
            view.write(value, what)
        elif value.requires_grad == view.stacked.requires_grad:
            view.replace(value, what)
        else:
            frozen_alone(what)

    # -- asked directly --------------------------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().named_parameters(prefix, recurse, remove_duplicate)
        if recurse:
            dotted = f"{prefix}." if prefix else ""
            for name, parameter in stacked_or_slices(parameters_among(outside_views(self))):
                yield dotted + name, cast("nn.Parameter", parameter)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        if recurse:
            dotted = f"{prefix}." if prefix else ""
            views = {name: view for name, view in outside_views(self).items() if view.is_buffer}
            yield from ((dotted + name, buffer) for name, buffer in stacked_or_slices(views))

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        views = views_of(self)
        if name in views:
            self._fxopt_write(name, views[name], tensor)
        elif _loses_tensor(self, name, tensor):
            raise _refusal(self, f"'{name}' cannot become None")
        else:
            super().register_buffer(name, tensor, persistent)


def _loses_tensor(part: FusedPart, name: str, value: object) -> bool:
    """Say whether a module that others compute for would be without a tensor that they read."""
    return value is None and "forward" in sealed_names(part) and own_tensor(part, name) is not None


def _refusal(part: FusedPart, what: str) -> FusedMemberError:
    return FusedMemberError(
        f"this {type(part).__name__} was fused or folded, or holds a module that was: {what}. {ADVICE}"
    )


# -- classes -------------------------------------------------------------------------------------------------------


def fused_class(base: type[nn.Module], names: tuple[str, ...] = ()) -> type[nn.Module]:
    """Return the subclass of `base`, named like it, for parts of an ensemble whose parameters `names` are slices.
    A parameter that is a property of the class already is read through that.
    """
    mixins = () if issubclass(base, FusedPart) else (FusedPart,)
    return subclass(base, mixins, lambda: _body(base, names), key=names)


def _body(base: type[nn.Module], names: tuple[str, ...]) -> dict[str, Any]:
    body: dict[str, Any] = {
        **remade_by(fused_class, base, names),
        FUSED_FROM: base,
        **{name: live(name) for name in names if not isinstance(getattr(base, name, None), property)},
    }
    if issubclass(base, _CONTAINERS):
        body |= {name: _refusing(name, getattr(base, name)) for name in _MUTATORS if hasattr(base, name)}
    if issubclass(base, nn.RNNBase):
        body |= read_by_name()
    return body


def _refusing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a container's method that changes what is in it, refusing once the container is sealed."""

    def refuse(self: FusedPart, *args: Any, **kwargs: Any) -> Any:
        if sealed_names(self):
            raise _refusal(self, f"{name} cannot change its members")
        return method(self, *args, **kwargs)

    return types.FunctionType(refuse.__code__, refuse.__globals__, name, None, refuse.__closure__)


# -- reading a member's parameter: of those that were cut once for all of a call of members one by one -----------------
# Autograd then has one node, not one for each member whose backward fills a tensor of the size of all.


@dataclass(slots=True)
class _Cut:
    """The slices of a parameter along dimension 0: right while it is in the `registry`, not written to, and `tracked`
    if gradients are asked for.
    """

    registry: dict[str, nn.Parameter | None]
    stacked: Tensor
    version: int
    tracked: bool
    slices: tuple[Tensor, ...]


def live(name: str) -> property:
    """Return the property through which a member's parameter is read; writing goes through `__setattr__`."""

    def read(self: nn.Module) -> Tensor:
        try:
            view: View = self.__dict__[VIEWS][name]
        except KeyError:
            raise AttributeError(name) from None
        cuts = this_call.kept
        if cuts is None:
            return view.read()
        store, stacked, position = view
        try:
            cut = cuts[store][stacked]
        except KeyError:
            cut = _cut(store, stacked, cuts)
        else:
            # Written out, for a call costs more than the answer: members read hundreds of times in a call of the model.
            tensor = cut.stacked
            same = cut.registry.get(stacked) is tensor and cut.version == version_of(tensor)
            if not same or not (cut.tracked or not torch.is_grad_enabled()):
                cut = _cut(store, stacked, cuts)
        return view.read() if cut is None else cut.slices[position]

    return property(read)


def _cut(store: nn.Module, name: str, cuts: dict[nn.Module, dict[str, _Cut]]) -> _Cut | None:
    """Return the slices of a parameter as they are to be had now, and note them in `cuts`; None of a buffer.
    They are kept between calls while the parameter is the same, and has no gradient, which `zero_grad` is to free.
    """
    registry = own_parameters(store)
    stacked = registry.get(name)
    if stacked is None or stacked.is_inference():  # such a tensor does not count its changes
        return None
    tracked, plain, gradient = torch.is_grad_enabled(), type(stacked) is nn.Parameter, stacked.grad

    def slices_of(whole: Tensor) -> tuple[Tensor, ...]:
        return by_member(store, name, whole.detach() if plain and not tracked else whole).unbind(0)

    if plain and gradient is None:
        kept: Cache = vars(store).setdefault(_KEPT, Cache())
        slices = kept.of(slices_of, stacked, key=(name, tracked, stacked.requires_grad))
    else:
        slices = slices_of(stacked)
    if gradient is not None:
        for member, part in zip(slices, by_member(store, name, gradient).unbind(0), strict=True):
            member.grad = part
    cut = cuts.setdefault(store, {})[name] = _Cut(registry, stacked, version_of(stacked), tracked, slices)
    return cut
