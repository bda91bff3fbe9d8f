"""The pass: regions of a model, computed by an engine that is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from ...errors import UsageError
from ...layers.delegated import Engine, engine_named, engines
from ...passes.contract import Pass
from ...passes.rewriting import Edit
from ...passes.sites import Goal, Numerics, OwnForward, Phase, Refusal, Site
from ...tracing.program import Program
from .find import found_in
from .write import Way, write

__all__ = ["Delegate"]

AUTO = "auto"
_BUDGETS = {torch.float32: 0.02, torch.bfloat16: 0.02, torch.int8: 0.05}
"""What can be computed in, with the error that it may make by default; float32 is judged by its rounding."""


@dataclass(frozen=True)
class Delegate(Pass):
    """Let an installed engine compute a model in evaluation, or the parts of it that one takes.

    Before: y = linear(relu(conv2d(x, weight, bias)), ...)    After: y, = engine(x, weight, bias, ...)
    Refuses: models in training; modules with hooks, parametrizations or a `__call__` of their own, and what writes to
        buffers, draws random numbers or decides by data: these stay calls, between regions.

    Options:
        engine: `auto` takes the fastest of those installed; else a name: `openvino`, `onnxruntime` or `aoti`.
        dtype: what is computed in: `float32`, or `bfloat16` within a float32 model, by engines that do. Where `float32`
            is faster, or `bfloat16` not within the budget, it is `float32`. `int8` stands for the layers of
            `quantize{scheme=int8_static}`, with what is around them in float32.
        budget: the error that may be made, relative to the scale of each tensor; by default 0.02 of `bfloat16`, and
            0.05 of `int8`, beside the quantized model.
    """

    engine: str = AUTO
    dtype: torch.dtype = torch.float32
    budget: float | None = None

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    goal: ClassVar[Goal] = Goal.SPEED
    phase: ClassVar[Phase] = Phase.EVAL
    contested: ClassVar[bool] = True
    own_forward: ClassVar[OwnForward | None] = OwnForward.ACCEPTABLE

    def __post_init__(self) -> None:
        if self.dtype not in tuple(_BUDGETS):
            raise UsageError(
                f"pass 'delegate': dtype={str(self.dtype).removeprefix('torch.')}; use float32, bfloat16 or int8"
            )
        if isinstance(self.engine, str) and self.engine != AUTO:
            engine_named(self.engine)
        if self.dtype is not torch.float32:
            object.__setattr__(self, "numerics", Numerics.APPROXIMATE)

    @property
    def error_budget(self) -> float:
        """Return the error that is allowed, relative to the scale of each tensor."""
        return _BUDGETS[self.dtype] if self.budget is None else super().error_budget

    @property
    def skippable(self) -> bool:
        """Say no: an engine gains most, and passes behind it look at what it leaves."""
        return False

    @property
    def _asked(self) -> Mapping[str, Engine]:
        if self.engine != AUTO:
            return {self.engine: engine_named(self.engine)}
        return {name: engine for name, engine in engines().items() if not engine.by_name}

    def _ways(self, *, missing: bool = False) -> tuple[Mapping[str, Way], str]:
        """Return in which ways engines can be used, `missing` ones too, by what plans call them; or why in none."""
        asked = self._asked
        reasons = {name: "" if missing else engine.reason_against(self.dtype) for name, engine in asked.items()}
        lossy = self.dtype is not torch.float32
        ways = {name: Way(name, self.dtype, *[self.error_budget] * lossy) for name in asked if not reasons[name]}
        if self.dtype is torch.bfloat16 and (ways or self.engine == AUTO):
            exact = (name for name, each in asked.items() if missing or not each.reason_against(torch.float32))
            ways |= {f"{name} float32": Way(name) for name in exact}
        return ways, "" if ways else "; ".join(reasons.values())

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        # What a plan hands to an engine that is missing here is computed by the model's own operations.
        ways, reason = self._ways(missing=program.replaying)
        if reason:
            yield Refusal(reason, "(root)")
            return
        yield from found_in(program, tuple(ways), required=self.engine != AUTO, in_8_bits=self.dtype is torch.int8)

    def rewrite(self, site: Site, edit: Edit) -> None:
        ways, _ = self._ways(missing=True)
        write(site, edit, ways[site.choice or next(iter(ways))])
