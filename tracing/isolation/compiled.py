"""Modules that `torch.compile` returned: while fxopt runs a model they run eagerly, and are not looked into."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

from ...compat import all_modules

__all__ = ["compiles", "eagerly", "is_in_compiled"]

_ORIGINAL = "_orig_mod"
"""Where the module that `torch.compile` returns keeps the one that it compiles."""


def compiles(module: nn.Module) -> bool:
    """Tell whether a module is what `torch.compile` returned for another one."""
    return isinstance(getattr(module, _ORIGINAL, None), nn.Module)


def is_in_compiled(name: str) -> bool:
    """Tell by its name whether a module is, or is inside, one that `torch.compile` compiles."""
    return _ORIGINAL in name.split(".")


@contextmanager
def eagerly(model: object) -> Generator[None]:
    """Run what is compiled in a model eagerly for a while: compiling a recorded run would compile the recorder, too."""
    if not isinstance(model, nn.Module) or not any(map(compiles, all_modules(model))):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
