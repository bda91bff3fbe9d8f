"""Run the stages one after the other over all ranks: for evaluation, and to learn what crosses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, distributed

from .running import StageModule

__all__ = ["Forms", "Relay"]

Forms = tuple[Tensor, ...]
"""What tensors cross, on the meta device."""

Crossed = tuple[list[Tensor], list[Any]]
"""What crosses: tensors, and what is no tensor."""


@dataclass(frozen=True)
class Relay:
    """The stages of this rank among those of all ranks."""

    stages: Mapping[int, StageModule]  # of this rank, by number
    count: int  # of all stages
    device: torch.device  # of this rank

    def run(self, number: int) -> dict[int, Forms]:
        """Run a microbatch through all stages; return what crossed before each, as far as this rank has seen it."""
        seen: dict[int, Forms] = {}
        crossed: Crossed = ([], [])
        for key in range(self.count):
            if key in self.stages:
                crossed = self._run_stage(key, crossed, number, seen)
            if key + 1 < self.count:
                crossed = self._hand_over(key, crossed)
        return seen

    def _run_stage(self, key: int, received: Crossed, number: int, seen: dict[int, Forms]) -> Crossed:
        stage = self.stages[key]
        stage.hear(number, [self._here(value) for value in received[1]])
        seen[key] = tuple(map(_described, received[0]))
        result = stage.run(received[0], number)
        if stage.is_last:
            stage.feed.results[number] = result
            return [], []
        tensors = [tensor.contiguous() for tensor in result[0]]
        seen[key + 1] = tuple(map(_described, tensors))
        return tensors, result[1]

    def _hand_over(self, key: int, crossed: Crossed) -> Crossed:
        """Give what a stage sends to the next, which may be on another rank."""
        size = distributed.get_world_size()
        source, target, rank = key % size, (key + 1) % size, distributed.get_rank()
        if source == target or rank not in (source, target):
            return [_leaf(t, t.requires_grad) for t in crossed[0]], crossed[1]
        if rank == source:
            forms = [(tuple(t.shape), t.dtype, t.requires_grad) for t in crossed[0]]
            distributed.send_object_list([(forms, crossed[1])], dst=target, device=self.device)
            for tensor in crossed[0]:
                distributed.send(tensor.detach(), dst=target)
            return [], []
        objects: list[Any] = [None]
        distributed.recv_object_list(objects, src=source, device=self.device)
        forms, plain = cast("tuple[Sequence[tuple[tuple[int, ...], torch.dtype, bool]], list[Any]]", objects[0])
        tensors: list[Tensor] = []
        for shape, dtype, requires_grad in forms:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            distributed.recv(tensor, src=source)
            tensors.append(_leaf(tensor, requires_grad))
        return tensors, plain

    def _here(self, value: Any) -> Any:
        """Return a value as it is on this rank: another one's device is not."""
        return self.device if isinstance(value, torch.device) else value


def _leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    return tensor.detach().requires_grad_(requires_grad and torch.is_grad_enabled())


def _described(tensor: Tensor) -> Tensor:
    form = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return form.requires_grad_(tensor.requires_grad)
