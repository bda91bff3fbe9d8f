"""What a scheme is, and where each is found."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, cast

from torch import nn

from ...passes.rewriting import Edit
from ...passes.sites import Refusal, Site
from ...tracing.program import Program

if TYPE_CHECKING:
    from .settings import Settings

__all__ = ["SCHEMES", "Scheme", "scheme_called"]


class Scheme(Protocol):
    """One way to quantize; each file named in `SCHEMES` has one, called `SCHEME`."""

    def check(self, settings: Settings, model: nn.Module) -> None:
        """Refuse, before any work, options and machines that the scheme can do nothing with.

        Raises:
            UsageError: with what to do instead.
        """
        ...

    def find(self, settings: Settings, program: Program) -> Iterable[Site | Refusal]:
        """Yield the layers to quantize, and why others stay; see `Pass.find`."""
        ...

    def rewrite(self, settings: Settings, site: Site, edit: Edit) -> None:
        """Rewrite one site; see `Pass.rewrite`."""
        ...


SCHEMES = {
    "int8_dynamic": ".dynamic",
    "int8_static": ".static",
    "int8_weight": ".weights",
    "int4_weight": ".weights",
    "float8": ".weights",
}
"""Each scheme -> the file, or folder, that knows it."""


def scheme_called(name: str) -> Scheme:
    """Return a scheme by its name, importing no other."""
    module = importlib.import_module(SCHEMES[name], __package__)
    return cast("Scheme", module.SCHEME)
