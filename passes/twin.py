"""Copies of a module that share its tensors: the state of the code at one moment, to run beside a later one."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn

from ..tracing.captured import capture_of

__all__ = ["twin"]

M = TypeVar("M", bound=nn.Module)


def twin(module: M) -> M:
    """Return a copy of the module tree as it runs now, on the same parameters and buffers.

    Later rewrites of `module` do not reach the copy; writes into its parameters do.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    for submodule in module.modules():
        capture = capture_of(submodule)
        if capture is not None:
            memo[id(capture)] = capture
    return copy.deepcopy(module, memo)
