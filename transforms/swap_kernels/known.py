"""Which kernels there are: fxopt's own, and those of other distributions."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from ...cuda_ops import KERNELS, Kernel
from ...errors import UsageError, did_you_mean

__all__ = ["GROUP", "kernels_named"]

GROUP = "fxopt.kernels"
"""The entry-point group of kernels from other distributions; fxopt's own win where names are equal."""


def kernels_named(names: Sequence[str], given: Sequence[Kernel] = ()) -> list[Kernel]:
    """Return the kernels of these names, all if there are none.

    Args:
        names: of kernels.
        given: kernels that need not be known; they win.

    Raises:
        UsageError: there is none of a name, or one cannot be loaded.
    """
    own = {kernel.name: kernel for kernel in (*KERNELS, *given)}
    if names and own.keys() >= set(names):
        return [own[name] for name in names]  # reading what all distributions offer takes longer than a swap
    others = {e.name: e for e in importlib.metadata.entry_points(group=GROUP) if e.name not in own}
    for name in names:
        if name not in own and name not in others:
            raise UsageError(f"swap_kernels: unknown kernel {name!r}{did_you_mean(name, [*own, *others])}")
    return [own[name] if name in own else _loaded(others[name]) for name in names or [*own, *others]]


def _loaded(entry: importlib.metadata.EntryPoint) -> Kernel:
    where = f"kernel {entry.name!r} ({entry.value})"
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{where} cannot be loaded: {error}") from error
    if not isinstance(found, Kernel) or found.name != entry.name:
        raise UsageError(f"{where} is no fxopt.cuda_ops.Kernel of that name")
    return found
