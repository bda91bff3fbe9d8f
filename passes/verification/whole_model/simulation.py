"""Compare a rewritten module with another one that it must be equal to, where the function changes by design."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from ....tracing.examples import Inputs
from ..demands import Verdict
from ..reference import reference
from ..samples import Reference, Sizes
from ..tape import SteadyDraws
from ..translation import MapState
from ..verify import verify

__all__ = ["Simulation"]


@dataclass
class Simulation:
    """The runs of what a rewritten module must be equal to, in each mode, without noise, which would fill what is
    zero there. Sizes inside may differ, so that no draws fit both: each is served the same number.
    """

    references: Sequence[Reference]  # its runs; noise would fill what is zero there
    is_random: bool = False  # whether random operators ran

    @classmethod
    def taken(
        cls, module: nn.Module, calls: Sequence[Inputs], *, modes: Sequence[bool | None], gradients: bool, seed: int,
        widest: torch.dtype = torch.float64, sizes: Sizes = Sizes.RECORDED,
    ) -> Simulation:  # fmt: skip
        """Run a module on its calls; it is left as it is."""

        def run(*, steady: bool) -> list[Reference]:
            with SteadyDraws() if steady else nullcontext():
                return [
                    reference(
                        module, calls, training=mode, gradients=gradients, seed=seed, brief=True, widest=widest,
                        sizes=sizes, whole=steady,
                    )
                    for mode in modes
                ]  # fmt: skip

        references = run(steady=False)
        is_random = any(each.conditions.random for each in references)
        return cls(run(steady=True) if is_random else references, is_random)

    def verdicts(self, module: nn.Module, map_state: MapState) -> list[Verdict]:
        """Return what a rewritten module is worth in each mode."""
        with SteadyDraws() if self.is_random else nullcontext():
            return [verify(each, module, map_state=map_state) for each in self.references]
