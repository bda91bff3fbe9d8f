"""The pass: regions of a model, computed by an engine that is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ...compat.packed import why_no_packing
from ...errors import UsageError
from ...layers.delegated import Engine, engine_named, engines
from ...passes.contract import Pass
from ...passes.rewriting import Edit
from ...passes.sites import Goal, Numerics, OwnForward, Phase, Refusal, Site
from ...tracing.program import Program
from .find import found_in, has_8_bits, seconds_to_take
from .write import Way, write

__all__ = ["Delegate"]

AUTO = "auto"
_BUDGETS = {torch.float32: 0.02, torch.bfloat16: 0.02, torch.int8: 0.05}
"""What can be computed in, with the error that it may make by default; float32 is judged by its rounding."""
_OTHER = {torch.bfloat16: torch.float32, torch.int8: torch.bfloat16}
"""What engines are tried in, too. In `int8` as such the floats are in float32; layers of 8 bits stay so in both."""


@dataclass(frozen=True)
class Delegate(Pass):
    """Let an installed engine compute a model in evaluation, or the parts of it that one takes.

    Before: y = linear(relu(conv2d(x, weight, bias)), ...)    After: y, = engine(x, weight, bias, ...)
    Refuses: models in training; modules with hooks, parametrizations or a `__call__` of their own, and what writes to
        buffers, draws random numbers or decides by data: these stay calls, between regions.

    Options:
        engine: `auto` takes the fastest of those installed; else a name: `openvino`, `onnxruntime` or `aoti`.
        dtype: what is computed in: `float32`, or `bfloat16` within a float32 model, by engines that do. Where `float32`
            is faster, or `bfloat16` not within the budget, it is `float32`. `int8` has the layers of
            `quantize{scheme=int8_static}` in 8 bits, those of `int8_dynamic` in floats on their rounded weights, and
            floats in `bfloat16` or `float32`, whatever is fastest.
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
                f"pass 'delegate': dtype={self.dtype!r}; use torch.float32, torch.bfloat16 or torch.int8; in text "
                "delegate{dtype=int8}"
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
        ways = {name: self._way(name, self.dtype) for name in asked if not reasons[name]}
        other = _OTHER.get(self.dtype)
        is_slow = self.dtype is torch.int8 and not missing and why_no_packing(torch.bfloat16)
        if other is not None and not is_slow and (ways or self.engine == AUTO):
            able = [name for name, each in asked.items() if missing or not each.reason_against(other)]
            ways |= {f"{name} {str(other).removeprefix('torch.')}": self._way(name, other) for name in able}
        return ways, "" if ways else "; ".join(reasons.values())

    def _way(self, engine: str, dtype: torch.dtype) -> Way:
        return Way(engine) if dtype is torch.float32 else Way(engine, dtype, self.error_budget)

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        # What a plan hands to an engine that is missing here is computed by the model's own operations.
        ways, reason = self._ways(missing=program.replaying)
        if reason:
            yield Refusal(reason, "(root)")
            return
        in_8_bits = self.dtype is torch.int8
        for each in found_in(program, tuple(ways), required=self.engine != AUTO, in_8_bits=in_8_bits):
            if in_8_bits and isinstance(each, Site) and not has_8_bits(each.found):
                # The most likely one first: it is taken where no time is left for a race.
                order = sorted(ways, key=lambda way: ways[way].dtype is torch.int8)
                yield replace(each, choices=tuple(order))
            else:
                yield each

    def seconds_to_write(self, site: Site) -> float:
        if site.found is None:
            return 0.0
        ways, _ = self._ways(missing=True)
        chosen = [site.choice] if site.choice else site.choices
        return min(seconds_to_take(site, ways[choice].engine) for choice in chosen)

    def rewrite(self, site: Site, edit: Edit) -> None:
        write(site, edit, self._chosen(site), in_8_bits=self.dtype is torch.int8)

    def settle(self, site: Site) -> None:
        for found in site.found or ():
            found.settle(self._chosen(site))

    def _chosen(self, site: Site) -> Way:
        ways, _ = self._ways(missing=True)
        return ways[site.choice or next(iter(ways))]
