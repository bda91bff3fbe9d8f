"""One member's module without tensors of its own: a pure function of its inputs and its state."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..runtime.values import map_leaves

__all__ = ["Slot", "Template"]


@dataclass(frozen=True)
class Slot:
    """A place in a call's arguments that an operand fills."""

    index: int


class Template(nn.Module):
    """Call a module that cannot be written as a graph, given its tensors and training flags as operands.
    `arguments` of its call have a `Slot` for each operand; `state` names what the last operands are.
    """

    def __init__(self, module: nn.Module, arguments: Any, state: tuple[str, ...]) -> None:
        super().__init__()
        # Not registered: its tensors are placeholders, no part of the model's state.
        self.__dict__["template"] = copy.deepcopy(module).to("meta")
        self.arguments, self.state = arguments, state

    def forward(self, *operands: Any) -> Any:
        """Return what the module gives; buffers that it writes are written in the operands."""
        inputs = len(operands) - len(self.state)
        args, kwargs = map_leaves(
            lambda leaf: operands[leaf.index] if isinstance(leaf, Slot) else leaf, self.arguments, Slot
        )
        tensors: dict[str, Tensor] = {}
        for name, value in zip(self.state, operands[inputs:], strict=True):
            if isinstance(value, Tensor):
                tensors[name] = value
            else:
                self._part(name).training = value
        # The fused inference kernels of attention have no batching rule.
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with sdpa_kernel(SDPBackend.MATH):
                return torch.func.functional_call(self.__dict__["template"], tensors, args, kwargs)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)

    def _part(self, flag: str) -> nn.Module:
        template: nn.Module = self.__dict__["template"]
        return template.get_submodule(flag.rpartition(".")[0])

    def extra_repr(self) -> str:
        return type(self.__dict__["template"]).__name__
