"""What a user asks of structured pruning, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

__all__ = ["Criterion", "Scores", "Selection", "Target"]

Criterion = Literal["magnitude", "batchnorm", "taylor", "random"]
Target = Literal["units", "parameters", "flops", "latency"]
Scores = Mapping[str, Tensor] | Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Selection:
    """How the units that go are chosen.

    Attributes:
        amount: the share that goes, of what `target` names.
        scope: rank units of each group by themselves ("layer"), or those of all groups ("global").
        target: what `amount` is a share of: the units, or the model's parameters, floating-point operations or latency.
        criterion: what a unit is judged by, where no scores are given.
        norm: of weights, "l1" or "l2".
        round_to: keep a multiple of so many channels or hidden units.
        keep: names or classes of modules that stay whole.
        seed: of random scores.
        scores: the user's own: name of a parameter -> tensor of its shape; or a function of a parameter's name and
            value that gives that tensor.
        loss: for "taylor": of the model's output, or with `data` of the model and a batch.
        data: for "taylor": batches.
    """

    amount: float
    scope: Literal["layer", "global"] = "global"
    target: Target = "units"
    criterion: Criterion = "magnitude"
    norm: Literal["l1", "l2"] = "l2"
    round_to: int = 1
    keep: tuple[str, ...] = ()
    seed: int = 0
    scores: Scores | None = None
    loss: Callable[..., Any] | None = None
    data: Iterable[Any] | None = None
