"""Children that TorchScript compiled: while a model is worked on, their registries are plain dictionaries."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...compat import all_modules
from ..values import is_scripted

__all__ = ["make_registries_plain", "plain_registries"]

_REGISTRIES = ("_parameters", "_buffers", "_modules")


@contextmanager
def plain_registries(model: nn.Module) -> Generator[None]:
    """Let scripted modules inside `model` show their tensors and children as plain dictionaries for a while."""
    scripted = [module for module in all_modules(model) if is_scripted(module)]
    kept = [(vars(module), {name: vars(module)[name] for name in _REGISTRIES}) for module in scripted]
    try:
        make_registries_plain(model)
        yield
    finally:
        for attributes, registries in kept:
            attributes.update(registries)


def make_registries_plain(model: nn.Module) -> None:
    """Let scripted modules inside a copy that no user gets show their tensors and children as plain dictionaries."""
    for module in filter(is_scripted, all_modules(model)):
        vars(module).update({name: _plain(vars(module)[name]) for name in _REGISTRIES})


def _plain(registry: Any) -> dict[str, Any]:
    return dict(registry.items())
