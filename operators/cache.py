"""What is made of tensors, kept as long as these are the same, unchanged: the one cache behind all that is derived."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from .unchanged import Unchanged

__all__ = ["Cache"]


class Cache:
    """Keep what functions make of tensors as long as these are `Unchanged`; several threads may call it.
    It is in no state dict, copy or pickle. Who has one forgets after a backward, and where the mode is set: not all
    writes of fused optimizers are seen.
    """

    compares_whole: ClassVar[bool] = False
    """Compare tensors of inference mode, whose writes torch does not count, in full."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Any, ...]] = {}
        """By key: the tensors as they were, and what was made of them."""

    def of(self, make: Callable[..., Any], *tensors: Tensor | None, key: Hashable = None) -> Any:
        """Return `make(*tensors)`, or what it made of the same tensors before: for a key always of so many."""
        kept = self._kept.get(key)
        if kept is not None and kept[0].same(*tensors):
            return kept[1]
        noted = Unchanged(tensors, whole=self.compares_whole)  # what a thread writes meanwhile is seen next time
        made = make(*tensors)
        self._keep(key, noted, tensors, made)
        return made

    def _keep(self, key: Hashable, noted: Unchanged, tensors: Sequence[Tensor | None], made: Any) -> None:
        self._kept[key] = noted, made  # at once: another thread sees the old pair or the new one

    def last(self, key: Hashable = None) -> Any:
        """Return what was made last; None if nothing is kept."""
        kept = self._kept.get(key)
        return None if kept is None else kept[1]

    def forget(self, key: Hashable = None) -> None:
        """Let something be made anew: what it is made of may have been written to unseen."""
        self._kept.pop(key, None)

    def forget_all(self) -> None:
        """Let everything be made anew."""
        self._kept.clear()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)  # what is kept follows from the tensors beside it

    def __hash__(self) -> int:
        return hash(type(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()
