"""Local training with outer steps: processes train alone, and what they learned is averaged once in a while."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.optim import SGD

from ...compat.distributed import broadcast_together
from ...errors import UsageError

__all__ = ["OuterSteps"]

_Bucket = list[tuple[nn.Parameter, nn.Parameter]]
"""Outer parameters, each with the one that is trained."""

_MESSAGE_BYTES = 25 * 2**20
"""A message is sent once it has so many bytes, as by torch's reducer."""


class OuterSteps:
    """Average what processes learned in `every` local steps, and take it as the gradient of an outer step.

    The outer optimizer is SGD with Nesterov momentum, as in DiLoCo (Douillard et al. 2023, "DiLoCo: Distributed
    Low-Communication Training of Language Models", algorithm 1), whose defaults these are. With `lr=1, momentum=0` the
    parameters are averaged: local SGD. For models that `ddp{local_after=...}` replicates, or under `fxopt.no_sync`.

    Args:
        parameters: of the model, in the same order in every process; all processes make this object, and start from the
            numbers of process 0.
        every: how many steps a process makes alone.
        after: so many steps are made together before.
        lr: of the outer steps.
        momentum: of the outer steps.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        every: int,
        *,
        after: int = 0,
        lr: float = 0.7,
        momentum: float = 0.9,
    ) -> None:
        if every < 1 or after < 0:
            raise UsageError(f"every={every}, after={after}; give numbers of steps, `every` 1 at the least")
        self._inner = [parameter for parameter in parameters if parameter.requires_grad]
        self._outer = [nn.Parameter(parameter.detach().clone()) for parameter in self._inner]
        self._optimizer = SGD(self._outer, lr=lr, momentum=momentum, nesterov=momentum > 0)
        self._every, self._after, self._steps = every, after, 0
        if not after:
            self._begin()

    @torch.no_grad()
    def step(self) -> bool:
        """Count a step of the optimizer; every so often, make an outer step, and say so. To be called after each."""
        self._steps += 1
        if self._steps == self._after:
            self._begin()
        if self._steps <= self._after or (self._steps - self._after) % self._every:
            return False
        for bucket in _buckets(self._outer, self._inner):
            _average(bucket)
        self._optimizer.step()
        self._optimizer.zero_grad()  # what was sent is not held until the next outer step
        self._hand_out()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run goes on from, beside the state of the model; it is equal in all processes."""
        return {"steps": self._steps, "outer": [p.detach() for p in self._outer], "sgd": self._optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        self._steps = state["steps"]
        self._optimizer.load_state_dict(state["sgd"])
        for outer, saved in zip(self._outer, state["outer"], strict=True):
            outer.copy_(saved)

    @torch.no_grad()
    def _begin(self) -> None:
        """Let all processes begin from the parameters of process 0."""
        for outer, inner in zip(self._outer, self._inner, strict=True):
            outer.copy_(inner)
        broadcast_together(self._outer)
        self._hand_out()

    def _hand_out(self) -> None:
        for outer, inner in zip(self._outer, self._inner, strict=True):
            inner.copy_(outer)


def _buckets(outer: Iterable[nn.Parameter], inner: Iterable[nn.Parameter]) -> Iterator[_Bucket]:
    """Yield parameters that are sent in one message: of one kind, in their order."""
    found = defaultdict[tuple[torch.dtype, torch.device], _Bucket](list)
    for pair in zip(outer, inner, strict=True):
        bucket = found[pair[0].dtype, pair[0].device]
        bucket.append(pair)
        if sum(each.nbytes for each, _ in bucket) >= _MESSAGE_BYTES:
            yield found.pop((pair[0].dtype, pair[0].device))
    yield from found.values()


def _average(bucket: _Bucket) -> None:
    """Let the gradient of each outer parameter be what the processes learned on average: a view of the message."""
    flat = bucket[0][0].new_empty(sum(outer.numel() for outer, _ in bucket))
    views = cast("Sequence[Tensor]", torch.split(flat, [outer.numel() for outer, _ in bucket]))
    for (outer, inner), view in zip(bucket, views, strict=True):
        outer.grad = torch.sub(outer, inner, out=view.view(outer.shape))
    flat.div_(distributed.get_world_size())
    distributed.all_reduce(flat)
