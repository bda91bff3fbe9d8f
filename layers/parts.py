"""The class of modules inside a fused ensemble: members whose parameters live elsewhere, and the containers above them.

Such a class is made on the fly from the user's own, and named like it. It reads two entries of a module's `__dict__`:
`_fxopt_views`, parameter name -> `View`, and `_fxopt_sealed`, the names of what must stay what it is: children, and of
a module that is not called by itself any more also its `forward` and the settings that its computation was read with.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..compat import modules_by_name, own_tensor, version_of
from ..errors import FusedMemberError
from ..passes.state import VIEWS
from ..tracing.graphs import Captured, sharing
from ..tracing.values import class_recipe, qualified, subclass, user_class
from .saving import SavesSlices
from .slices import ADVICE, Slice, refuse_sharded_slice, write

__all__ = ["FUSED_FROM", "SEALED", "VIEWS", "FusedPart", "View", "fused_class", "live_weights"]

SEALED = "_fxopt_sealed"
FUSED_FROM = "_fxopt_fused_from"

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_MUTATORS = (
    "__delitem__", "__iadd__", "__imul__", "__setitem__", "append", "clear", "extend", "insert", "pop", "update",
)  # fmt: skip


class View(NamedTuple):
    """Slice `position` of the parameter or buffer `name` of `store`."""

    store: nn.Module
    name: str
    position: int

    @property
    def stacked(self) -> Tensor:
        stacked = own_tensor(self.store, self.name)
        return getattr(self.store, self.name) if stacked is None else stacked

    @property
    def is_buffer(self) -> bool:
        return self.name in self.store._buffers  # pyright: ignore[reportPrivateUsage]

    def read(self) -> Tensor:
        """Return the slice, attached to the stacked parameter; its `.grad` is the slice of that one's gradient."""
        stacked = self.stacked
        refuse_sharded_slice(stacked, self.name)
        member = stacked[self.position]
        if torch.compiler.is_compiling():
            return member
        member = member.as_subclass(Slice)
        if stacked.is_leaf and stacked.grad is not None:
            member.grad = stacked.grad[self.position]
        return member

    def write(self, value: Tensor, what: str) -> None:
        """Copy a tensor of the same shape into the slice."""
        refuse_sharded_slice(self.stacked, self.name)
        write(self.stacked[self.position], value, what)


def _hook_registration(name: str) -> Callable[..., Any]:
    """Return a method that registers a hook, unless the module's original forward is not run any more."""

    def register(self: FusedPart, *args: Any, **kwargs: Any) -> Any:
        if "forward" in sealed_names(self):
            raise _refusal(self, "it is not called by itself, so a hook would never run")
        return getattr(super(FusedPart, self), name)(*args, **kwargs)

    return register


class FusedPart(SavesSlices):
    """Mix into the class of a module inside a fused ensemble.

    A member's parameters read as slices of the stacked ones, and writing to them writes there. Asked directly, a part
    of the ensemble lists, saves and loads its parameters as if they were its own. What would cut the module tree loose
    from the computation raises `FusedMemberError`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self, Captured):
            # Someone called type(member)(...): a new module, of the user's class, that is part of nothing.
            self.__class__ = cast("Any", user_class(type(self)))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the user's own hook for subclasses (registries, say) from seeing the classes made here."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, class_recipe(type(self)), self.__getstate__()

    # -- what a member is made of ----------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        view = views_of(self).get(name)
        if view is not None:
            self._fxopt_write(name, view, value)
            return
        sealed = sealed_names(self)
        if name in sealed and self._modules.get(name, self.__dict__.get(name)) is not value:
            raise _refusal(self, f"'{name}' cannot be replaced")
        if sealed and name not in sealed and isinstance(value, nn.Module) and isinstance(self, _CONTAINERS):
            raise _refusal(self, f"'{name}' cannot be added")
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
        elif views:
            raise _refusal(self, f"the parameter '{name}' cannot be added (by pruning or a normalization, say)")
        else:
            super().register_parameter(name, param)

    register_forward_hook = _hook_registration("register_forward_hook")
    register_forward_pre_hook = _hook_registration("register_forward_pre_hook")
    register_backward_hook = _hook_registration("register_backward_hook")
    register_full_backward_hook = _hook_registration("register_full_backward_hook")
    register_full_backward_pre_hook = _hook_registration("register_full_backward_pre_hook")

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        if any(not isinstance(parameter, nn.Parameter) for parameter in self.parameters()):
            raise _refusal(self, "one member cannot be frozen by itself")
        return super().requires_grad_(requires_grad)

    def _replicate_for_data_parallel(self) -> Any:
        replica: Any = super()._replicate_for_data_parallel()
        # The children of a replica are replicas, too.
        replica.__dict__.pop(SEALED, None)
        return replica

    def _fxopt_write(self, name: str, view: View, value: object) -> None:
        if not isinstance(value, Tensor):
            raise _refusal(self, f"'{name}' cannot become {value!r}")
        view.write(value, f"'{name}' of this {type(self).__name__}")

    # -- asked directly --------------------------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().named_parameters(prefix, recurse, remove_duplicate)
        if recurse:
            dotted = f"{prefix}." if prefix else ""
            for name, parameter in _stacked_or_slices(_parameter_views(self)):
                yield dotted + name, cast("nn.Parameter", parameter)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        if recurse:
            dotted = f"{prefix}." if prefix else ""
            views = {name: view for name, view in _outside(self).items() if view.is_buffer}
            yield from ((dotted + name, buffer) for name, buffer in _stacked_or_slices(views))

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        views = views_of(self)
        if name in views:
            self._fxopt_write(name, views[name], tensor)
        else:
            super().register_buffer(name, tensor, persistent)


def _refusal(part: FusedPart, what: str) -> FusedMemberError:
    return FusedMemberError(
        f"this {type(part).__name__} was fused or folded, or holds a module that was: {what}. {ADVICE}"
    )


def views_of(module: nn.Module) -> Mapping[str, View]:
    """Return the parameters of a member that are slices of stacked ones, by name."""
    return module.__dict__.get(VIEWS, {})


def sealed_names(module: nn.Module) -> frozenset[str]:
    """Return the names of a module's children and settings that must stay what they are."""
    return module.__dict__.get(SEALED, frozenset())


def _outside(module: nn.Module) -> dict[str, View]:
    """Return the slices that `module` and its children read from stores that are not among its children."""
    children = modules_by_name(module)
    inside = {id(child) for child in children.values()}
    return {
        qualified(path, name): view
        for path, child in children.items()
        for name, view in child.__dict__.get(VIEWS, {}).items()
        if id(view.store) not in inside
    }


def _parameter_views(module: nn.Module) -> dict[str, View]:
    return {name: view for name, view in _outside(module).items() if not view.is_buffer}


def _stacked_or_slices(views: Mapping[str, View]) -> Iterator[tuple[str, Tensor]]:
    """Yield a stacked parameter once where all its slices are there, else each slice that is."""
    families: dict[tuple[int, str], list[str]] = {}
    for name, view in views.items():
        families.setdefault((id(view.store), view.name), []).append(name)
    for names in families.values():
        stacked = views[names[0]].stacked
        if len({views[name].position for name in names}) == stacked.shape[0]:
            yield f"{names[0]}..{names[-1]}", stacked
        else:
            yield from ((name, views[name].read()) for name in names)


# -- classes -------------------------------------------------------------------------------------------------------


def fused_class(base: type[nn.Module], names: tuple[str, ...] = ()) -> type[nn.Module]:
    """Return the subclass of `base`, named like it, for parts of an ensemble whose parameters `names` are slices.

    A parameter that is a property of the class already is read through that.
    """
    mixins = () if issubclass(base, FusedPart) else (FusedPart,)
    return subclass(base, mixins, lambda: _body(base, names), key=names)


def _body(base: type[nn.Module], names: tuple[str, ...]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "_fxopt_base": user_class(base),
        FUSED_FROM: base,
        "_fxopt_recipe": (_remade, (class_recipe(base), names)),
        **{name: _live(name) for name in names if not isinstance(getattr(base, name, None), property)},
    }
    if issubclass(base, _CONTAINERS):
        body |= {name: _refusing(name, getattr(base, name)) for name in _MUTATORS if hasattr(base, name)}
    if issubclass(base, nn.RNNBase):
        body["_flat_weights"] = property(live_weights, lambda self, value: None)
    return body


def _remade(recipe: tuple[Callable[..., type[nn.Module]], tuple[Any, ...]], names: tuple[str, ...]) -> type[nn.Module]:
    """Return the class again, whose base may be one that was made on the fly, too."""
    make, arguments = recipe
    return fused_class(make(*arguments), names)


def _rebuild(make: Callable[..., type[nn.Module]], arguments: tuple[Any, ...]) -> nn.Module:
    return nn.Module.__new__(make(*arguments))


def _live(name: str) -> property:
    """Return the property through which a member's parameter is read; writing goes through `__setattr__`."""

    def read(self: nn.Module) -> Tensor:
        try:
            view: View = self.__dict__[VIEWS][name]
        except KeyError:
            raise AttributeError(name) from None
        call = sharing.call
        if call is None:
            return view.read()
        store, stacked, position = view
        try:
            cut = call.cuts[store][stacked]
        except KeyError:
            cut = call.cut(store, stacked)
        else:
            # Written out, for a call costs more than the answer: members read hundreds of times in a call of the model.
            tensor = cut.stacked
            same = cut.registry.get(stacked) is tensor and cut.version == version_of(tensor)
            if not same or not (cut.tracked or not torch.is_grad_enabled()):
                cut = call.cut(store, stacked)
        return view.read() if cut is None else cut.slices[position]

    return property(read)


def live_weights(layer: nn.RNNBase) -> list[Any]:
    """Return the weights that a recurrent layer computes with; it keeps a list of its own otherwise."""
    names: list[str] = layer.__dict__.get("_flat_weights_names", [])
    return [getattr(layer, name, None) for name in names]


def _refusing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a container's method that changes what is in it, refusing once the container is sealed."""

    def refuse(self: FusedPart, *args: Any, **kwargs: Any) -> Any:
        if sealed_names(self):
            raise _refusal(self, f"{name} cannot change its members")
        return method(self, *args, **kwargs)

    return types.FunctionType(refuse.__code__, refuse.__globals__, name, None, refuse.__closure__)
