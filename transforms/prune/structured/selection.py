"""What a user asks of structured pruning, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from ....errors import UsageError

__all__ = ["Criterion", "Scores", "Selection", "Target"]

Criterion = Literal["magnitude", "batchnorm", "taylor", "random", "given"]
Target = Literal["units", "parameters", "flops", "latency"]
Scores = Mapping[str, Tensor] | Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Selection:
    """How the units that go are chosen.

    Attributes:
        amount: the share that goes, of what `target` names.
        scope: rank units of each group by themselves ("layer"), or those of all groups ("global").
        target: what `amount` is a share of: the units, or the model's parameters, floating-point operations or latency.
        criterion: what a unit is judged by.
        norm: of weights, "l1" or "l2".
        round_to: keep a multiple of so many channels or hidden units.
        keep: names of modules that stay whole.
        seed: of random scores.
        scores: the user's own: a tensor for each parameter, of its shape, or for each layer, of one number a unit; or
            a function of a parameter's name and value that gives the former.
        loss: for "taylor": of the model's output, or with `data` of the model and a batch.
        data: for "taylor": batches.
    """

    amount: float
    scope: Literal["layer", "global"] = "layer"
    target: Target = "units"
    criterion: Criterion = "magnitude"
    norm: Literal["l1", "l2"] = "l2"
    round_to: int = 1
    keep: tuple[str, ...] = ()
    seed: int = 0
    scores: Scores | None = None
    loss: Callable[..., Any] | None = None
    data: Iterable[Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.amount, bool) or not 0 <= self.amount < 1:
            raise UsageError(f"amount={self.amount!r}; give the share to remove, from 0 to below 1")
        if isinstance(self.round_to, bool) or self.round_to < 1:
            raise UsageError(f"round_to={self.round_to!r}; give a number of units, 1 or more")
        for name, value, known in (("criterion", self.criterion, Criterion), ("target", self.target, Target)):
            if value not in get_args(known):
                raise UsageError(f"{name}={value!r}; it is one of {', '.join(get_args(known))}")
        if (self.criterion == "given") != (self.scores is not None):
            raise UsageError("criterion=given and scores= go together: give both, or neither")
        if self.data is not None and self.loss is None:
            raise UsageError("data= needs loss=, a function of the model and a batch")
