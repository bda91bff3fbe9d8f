"""The words of the option `keep`."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from ...tracing.values import user_class

__all__ = ["is_kept"]


def is_kept(words: Sequence[str], name: str, module: nn.Module) -> bool:
    """Say whether a word names a module, or one around it: by the name, which may hold `*`, or by its own class."""
    parts = name.split(".")
    around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    kind = user_class(type(module)).__name__
    return any(word == kind or any(fnmatchcase(path, word) for path in around) for word in words)
