"""What is left of a residual block that is gone: it gives what it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ...compat import modules_by_name
from .experts import RemovedExpert

__all__ = ["SkippedBlock", "hidden_state"]


class SkippedBlock(RemovedExpert):
    """Hand on what a block was given; its tensors are empty, and its plain attributes are there for code that asks."""

    length: int | None  # of the tuple that the block gave

    @classmethod
    def skipping(cls, module: nn.Module, length: int | None) -> SkippedBlock:
        """Return what takes the place of a block that gives a tensor, or a tuple of `length` with nothing behind it."""
        made = cls.of(module)
        copies = modules_by_name(made, every_name=True)
        for path, part in modules_by_name(module, every_name=True).items():
            plain = {name: value for name, value in vars(part).items() if isinstance(value, (bool, int, float, str))}
            vars(copies[path]).update({name: value for name, value in plain.items() if not name.startswith("_")})
        made.length = length
        return made

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden state that the block is called with."""
        given = hidden_state(args, kwargs)
        return given if self.length is None else (given, *[None] * (self.length - 1))


def hidden_state(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the stream that a block is called with: the first tensor of its arguments, or of those by name."""
    if args:
        return args[0] if isinstance(args[0], Tensor) else None
    found = kwargs.get("hidden_states", next(iter(kwargs.values()), None))
    return found if isinstance(found, Tensor) else None
