"""The pass: layers computed on weights that are packed once for this machine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ...compat.packed import why_no_packing
from ...errors import MatchFailure, UsageError
from ...passes.contract import Pass
from ...passes.rewriting import Edit
from ...passes.sites import Goal, Numerics, OwnForward, Phase, Refusal, Site
from ...tracing.program import Program
from .find import found_in
from .recurrent import LABEL, recurrent_in, write_recurrent
from .write import write

__all__ = ["Pack"]


@dataclass(frozen=True)
class Pack(Pass):
    """Compute linears and convolutions, with what stands behind them, and LSTMs on weights packed once by oneDNN.

    Before: relu(conv(x) + y)        After: packed_convolution(x, weight, bias, y)
    Refuses: weights that are no plain tensors of float32 on the CPU, layers with hooks or parametrizations, subclasses
        of those of torch.nn, padding with other than zeros, LSTMs with `proj_size`, models in training.

    Options:
        dtype: what is computed in: `float32`, or `bfloat16` within a float32 model.
        budget: the error that `bfloat16` may make, relative to the scale of each tensor; by default 0.02.
    """

    dtype: torch.dtype = torch.float32
    budget: float = 0.02

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    goal: ClassVar[Goal] = Goal.SPEED
    phase: ClassVar[Phase] = Phase.EVAL
    own_forward: ClassVar[OwnForward | None] = OwnForward.ACCEPTABLE
    profiles_itself: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise UsageError(f"pass 'pack': dtype={str(self.dtype).removeprefix('torch.')}; use float32 or bfloat16")
        if self.dtype is torch.bfloat16:
            object.__setattr__(self, "numerics", Numerics.APPROXIMATE)

    def check(self, model: nn.Module) -> None:
        _ = self.error_budget

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        reason = why_no_packing(self.dtype)
        if reason:
            return iter([Refusal(reason, "(root)")])
        budget = self.error_budget
        return itertools.chain(found_in(program, self.dtype, budget), recurrent_in(program, self.dtype, budget))

    def judgement(self, site: Site) -> Mapping[str, Any]:
        return {} if site.found is None else {"precision_error": site.found}

    def rewrite(self, site: Site, edit: Edit) -> None:
        writes = write_recurrent if LABEL in site.nodes else write
        if not writes(site, edit, self.dtype):
            raise MatchFailure("a layer is not there any more")
