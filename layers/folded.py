"""What is left of a layer and of the batch norm that was folded into it: the original tensors, in their old places.

The layer gets a child, `folded`, which computes both; neither the layer itself nor the norm is called any more. Both
stay in the module tree, with their class names, and keep the original tensors as buffers (`unfolded_weight`). Reading
`layer.weight` gives them, and writing there folds anew, so that code which reaches for them never meets a stale tensor.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..compat import own_buffers, own_children, own_parameters
from ..errors import FusedMemberError, GuardError, ModeError
from ..passes.state_steps import Fold
from ..tracing.dynamic import class_recipe, user_class
from ..tracing.leaves import is_library
from .original import OriginalTensor
from .parts import ADVICE

__all__ = ["FoldedFrom", "FoldedPart", "expect_dimensions", "fold_modules", "is_folded"]

_KEY = "_fxopt_folded_from"


class FoldedFrom(NamedTuple):
    """Tie together what one fold is about; both modules have this in their `__dict__`.

    Attributes:
        step: what is folded, and how.
        layer: the convolution or linear; it holds the child `folded`.
        norm: the batch norm.
    """

    step: Fold
    layer: nn.Module
    norm: nn.Module

    def names(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names of the tensors that a module had before."""
        return self.step.layer_tensors if module is self.layer else self.step.norm_tensors

    def kept(self) -> list[Tensor]:
        """Return the originals, in the order in which `step` takes them."""
        places = [(self.layer, name) for name in self.step.layer_tensors]
        places += [(self.norm, name) for name in self.step.norm_tensors]
        return [getattr(module, f"unfolded_{name}") for module, name in places]

    def read(self, module: nn.Module, name: str) -> Tensor:
        """Return an original that is what the model computes with; writing into it folds anew."""
        if torch.compiler.is_compiling():
            return getattr(module, f"unfolded_{name}")
        self._follow()
        return OriginalTensor.of(getattr(module, f"unfolded_{name}"), self.refold)

    def _follow(self) -> None:
        """Bring the originals up to date, where the folded tensors were changed."""
        kept = self.kept()
        now = self.step.backward([*self._now(), *kept])
        with torch.no_grad():
            for old, new in zip(kept, now, strict=True):
                if new is not old:
                    old.copy_(new)

    def write(self, module: nn.Module, name: str, value: object) -> None:
        """Copy a tensor of the same shape into an original, and fold anew."""
        kept: Tensor = getattr(module, f"unfolded_{name}")
        if not isinstance(value, Tensor) or value.shape != kept.shape:
            what = f"shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise _refusal(module, f"'{name}' keeps its shape {list(kept.shape)} and cannot become {what}")
        self._follow()
        with torch.no_grad():
            kept.copy_(value)
        self.refold()

    def refold(self) -> None:
        """Compute the folded tensors from the originals as they are now."""
        new = self.step.forward(self.kept())
        with torch.no_grad():
            for tensor, value in zip(self._now(), new, strict=False):
                tensor.copy_(value)

    def _now(self) -> tuple[Tensor, Tensor]:
        """Return the tensors that the model computes with, which may be slices of a fused ensemble's."""
        folded: Any = self.layer.get_submodule("folded")
        return folded.weight, folded.bias


def _refusal(module: nn.Module, what: str) -> FusedMemberError:
    return FusedMemberError(f"this {type(module).__name__} was folded and is not called by itself: {what}. {ADVICE}")


def _refusing_hooks() -> Callable[..., Any]:
    def refuse(self: nn.Module, *_: Any, **__: Any) -> Any:
        raise _refusal(self, "a hook would never run")

    return refuse


class FoldedPart(nn.Module):
    """Mix into the class of a layer or norm that was folded: its tensors read and write the originals."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Someone called type(layer)(...): a new module, of the user's class, that is part of nothing.
        self.__class__ = cast("Any", user_class(type(self)))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the user's own hook for subclasses (registries, say) from seeing the classes made here."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, class_recipe(type(self)), self.__getstate__()

    def __setattr__(self, name: str, value: Any) -> None:
        fold = self.__dict__.get(_KEY)
        if fold is not None and name in fold.names(self):
            fold.write(self, name, value)
        elif fold is not None and name == "training" and value and fold.norm is self:
            raise ModeError(f"this {type(self).__name__} was folded for evaluation and cannot be trained. {ADVICE}")
        elif fold is not None and (name == "forward" or (name in self.__dict__ and name != "training")):
            raise _refusal(self, f"setting '{name}' would change nothing")
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._fxopt_keep(name)
        super().__delattr__(name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self._fxopt_keep(name)
        super().add_module(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._fxopt_keep(name)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        self._fxopt_keep(name)
        super().register_buffer(name, tensor, persistent)

    register_forward_hook = _refusing_hooks()
    register_forward_pre_hook = _refusing_hooks()
    register_backward_hook = _refusing_hooks()
    register_full_backward_hook = _refusing_hooks()
    register_full_backward_pre_hook = _refusing_hooks()

    def _fxopt_keep(self, name: str) -> None:
        fold = self.__dict__.get(_KEY)
        if fold is not None and name in (*fold.names(self), "folded"):
            raise _refusal(self, f"'{name}' cannot be removed or registered anew")


def expect_dimensions(x: Tensor, count: int) -> None:
    """Make sure that a batch norm that was folded would have normed the dimension that it was folded for.

    Args:
        x: what comes in, any shape.
        count: how many dimensions it must have.

    Raises:
        GuardError: if it has more or fewer.
    """
    if x.dim() != count:
        raise GuardError(
            f"a batch norm was folded for inputs of {count} dimensions, and this one has {x.dim()}; give "
            "fxopt.optimize example_inputs with as many"
        )


def is_folded(module: nn.Module) -> bool:
    """Say whether a module is a layer that a norm was folded into, or such a norm."""
    return _KEY in module.__dict__


def fold_modules(layer: nn.Module, norm: nn.Module, step: Fold) -> Callable[[], None]:
    """Give `layer` the child `folded`, which computes `norm(layer(x))`, and let both keep their originals aside.

    Args:
        layer: a convolution or linear whose forward is that of torch.nn.
        norm: the batch norm.
        step: what is folded.

    Returns:
        A function that puts everything back as it was.
    """
    back = [_remembered(module) for module in (layer, norm)]
    fold = FoldedFrom(step, layer, norm)
    originals = [getattr(layer, name) for name in step.layer_tensors]
    originals += [getattr(norm, name) for name in step.norm_tensors]
    weight, bias, *_ = step.forward(originals)
    folded = _like(layer, weight, bias)
    for module in (layer, norm):
        _set_aside(module, fold.names(module))
        module.__dict__[_KEY] = fold
        module.__class__ = _folded_class(type(module), fold.names(module))
    own_children(layer)["folded"] = folded

    def undo() -> None:
        for restore in back:
            restore()

    return undo


def _like(layer: nn.Module, weight: Tensor, bias: Tensor) -> nn.Module:
    """Return a layer of torch.nn with the same settings and other tensors; nothing is drawn to initialise it."""
    kind = cast("type[nn.Module]", next(base for base in type(layer).__mro__ if is_library(base)))
    new = nn.Module.__new__(kind)
    for name, value in vars(layer).items():
        new.__dict__[name] = copy.copy(cast("Any", value)) if isinstance(value, dict) else value
    trains = own_parameters(layer)["weight"]
    requires_grad = trains is not None and trains.requires_grad
    own_parameters(new).clear()
    own_parameters(new).update(weight=nn.Parameter(weight, requires_grad), bias=nn.Parameter(bias, requires_grad))
    return new


def _set_aside(module: nn.Module, names: Sequence[str]) -> None:
    """Move tensors to buffers with names of their own; the old names stay, without a value, to keep their order."""
    for name in names:
        registry: dict[str, Any] = own_parameters(module) if name in own_parameters(module) else own_buffers(module)
        own_buffers(module)[f"unfolded_{name}"] = registry[name].detach().clone()
        registry[name] = None


def _remembered(module: nn.Module) -> Callable[[], None]:
    cls = module.__class__
    registries = [own_parameters(module), own_buffers(module), own_children(module)]
    contents = [dict(registry) for registry in registries]

    def restore() -> None:
        module.__class__ = cls
        del module.__dict__[_KEY]
        for registry, content in zip(registries, contents, strict=True):
            registry.clear()
            registry.update(cast("Any", content))

    return restore


# -- classes -------------------------------------------------------------------------------------------------------

_Key = tuple[type[nn.Module], tuple[str, ...]]
_classes: weakref.WeakValueDictionary[_Key, type[nn.Module]] = weakref.WeakValueDictionary()


def _folded_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return the subclass of `base`, named like it, whose tensors `names` are originals of a fold."""
    known = _classes.get((base, names))
    if known is None:
        body: dict[str, Any] = {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "_fxopt_base": user_class(base),
            "_fxopt_recipe": (_folded_class, (base, names)),
            **{name: _live(name) for name in names},
        }
        made = types.new_class(base.__name__, (FoldedPart, base), exec_body=lambda namespace: namespace.update(body))
        known = _classes[base, names] = made
    return known


def _live(name: str) -> property:
    """Return the property through which an original is read; writing goes through `__setattr__`."""

    def read(self: nn.Module) -> Tensor:
        fold = self.__dict__.get(_KEY)
        if fold is None:
            raise AttributeError(name)
        return fold.read(self, name)

    return property(read)


def _rebuild(make: Callable[..., type[nn.Module]], arguments: tuple[Any, ...]) -> nn.Module:
    return nn.Module.__new__(make(*arguments))
