"""What sets the root of an optimized model apart: it has the record, and it loads checkpoints with original names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ...tracing.graphs import Capture, capture_of, install, uninstall
from ...tracing.values import class_recipe, subclass, user_class
from ..state import RECORD_KEY, LoadsOriginalNames
from .record import Record

__all__ = ["make_root"]


def make_root(model: nn.Module, record: Record) -> None:
    """Make `model` the root of an optimized model, whether or not its original forward could be captured."""
    capture = capture_of(model)
    uninstall(model, keep_regions=True)
    if not isinstance(model, LoadsOriginalNames):
        model.__class__ = loading_class(type(model))
    install(model, capture or Capture(type(model), []))
    model.__dict__[RECORD_KEY] = record


def loading_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `base`, named like it, whose `load_state_dict` takes original names too."""
    return subclass(base, (LoadsOriginalNames,), lambda: _body(base), key="loading")


def _body(base: type[nn.Module]) -> dict[str, Any]:
    return {
        "__init_subclass__": classmethod(_keep_quiet),
        "_fxopt_base": user_class(base),
        "_fxopt_recipe": (_loading_class_of, class_recipe(base)),
    }


def _keep_quiet(cls: type, **kwargs: Any) -> None:
    """Keep the user's own hook for subclasses (registries, say) from seeing the class made here."""


def _loading_class_of(make: Callable[..., type[nn.Module]], arguments: tuple[Any, ...]) -> type[nn.Module]:
    return loading_class(make(*arguments))
