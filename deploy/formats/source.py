"""What a format writes: a model, the program that torch exported of it, and names for arguments and results."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram

from ...errors import ArchiveError
from ...runtime.values import flatten
from ...tracing.examples import Inputs

__all__ = ["Source", "named_tensors", "result_names"]


@dataclass(frozen=True)
class Source:
    """A model in evaluation mode whose outputs are plain, its first call, what it gave then, and its program."""

    model: nn.Module
    call: Inputs
    given: Mapping[str, Any]
    program: ExportedProgram | None

    @property
    def arguments(self) -> dict[str, Tensor]:
        """Return the tensors among the arguments, in order, by name."""
        return named_tensors(self.model, self.call)


def named_tensors(model: nn.Module, call: Inputs) -> dict[str, Tensor]:
    """Return the tensors among the arguments of a call, in order, by names: `x`, `states_0`."""
    positional = inspect.signature(model.forward).bind_partial(*call.args).arguments
    return _named({**positional, **call.kwargs})


def result_names(given: Mapping[str, Any]) -> list[str]:
    """Return a name for each result of a call that is a tensor; raise `ArchiveError` for numbers among the results."""
    found = {name: leaf for name, leaf in given.items() if name.startswith("output") and leaf is not None}
    for name, leaf in found.items():
        if not isinstance(leaf, Tensor):
            raise ArchiveError(f"{name} is a number, and such files give tensors; export it as .pt2 or aoti")
    return [_plain_name(name) for name in found]


def _named(values: Mapping[str, Any]) -> dict[str, Tensor]:
    leaves = {f"{name}{where}": leaf for name, value in values.items() for where, leaf in flatten(value).items()}
    return {_plain_name(name): leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}


def _plain_name(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_")
