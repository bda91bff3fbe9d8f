"""The options of the pass, which methods read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor

__all__ = ["KINDS", "Kind", "Settings"]

Kind = Literal["channels", "heads", "hidden", "experts"]
"""What a unit is: a channel of convolutions, an attention head, a hidden unit of linears, a whole expert."""

KINDS: tuple[Kind, ...] = get_args(Kind)

Scores = Mapping[str, Tensor] | Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Settings:
    """What the user asks for; `Prune` says what each option means."""

    method: Literal["magnitude", "random", "nm", "structured"] = "magnitude"
    amount: float = 0.5
    scope: Literal["global", "layer"] = "global"
    norm: Literal["l1", "l2"] = "l2"
    pattern: str | None = None
    permute: bool = False
    keep: tuple[str, ...] = ()
    schedule: Literal["one_shot", "linear", "cubic"] = "one_shot"
    seed: int = 0
    criterion: Literal["magnitude", "batchnorm", "taylor", "routing", "random"] = "magnitude"
    kinds: tuple[Kind, ...] = KINDS
    target: Literal["units", "parameters", "flops", "latency"] = "units"
    round_to: int = 1
    scores: Scores | None = field(default=None, compare=False, repr=False)
    loss: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    data: Iterable[Any] | None = field(default=None, compare=False, repr=False)
