"""What users do with a model besides calling it: convert it to float64, freeze it, step its parameters in place."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ....runtime.values import Arguments
from ..execution import Outcome
from ..inputs import perturbed_inputs, perturbed_state
from ..reference_runs import ReferenceRuns

__all__ = ["Calls", "Use", "Used", "run_in_use", "taken_uses"]


class Use(enum.Enum):
    """What is done with a module before it is called."""

    DOUBLE = "as .double()"
    FROZEN = "with frozen parameters"
    STEPPED = "after its parameters and arguments were changed in place"


Calls = tuple[Arguments, Arguments]
"""A call, and another of the same form."""


@dataclass(frozen=True)
class Used:
    """A use, and what came of it.

    Attributes:
        use: what was done.
        calls: the call, and what its arguments are changed to where they are changed in place.
        state: parameters and buffers by name, as they were in the run.
        run: of the original.
        exact: the exact run to judge it by, where there is another.
    """

    use: Use
    calls: Calls
    state: Mapping[str, Tensor]
    run: Outcome
    exact: Outcome | None = None


def run_in_use(
    runs: ReferenceRuns, use: Use, calls: Calls, state: Mapping[str, Tensor], stepped: Mapping[str, Tensor]
) -> Outcome:
    """Run a module in a use.

    Args:
        runs: of the module.
        use: what to do before.
        calls: see `Used`.
        state: its tensors by name.
        stepped: what they are changed to where they are changed in place.
    """
    if use is Use.DOUBLE:
        return runs.doubled(calls[0], state)
    if use is Use.FROZEN:
        return runs.exact(calls[0], state, frozen=True)
    return runs.stepped(calls, state, stepped)


def taken_uses(runs: ReferenceRuns, arguments: Arguments, state: Mapping[str, Tensor]) -> list[Used]:
    """Return the uses that a module takes, with their runs."""
    found: list[Used] = []
    calls = arguments, perturbed_inputs(arguments, runs.seed + 3)
    for use in _sensible(runs):
        after = _stepped(state, runs.seed) if use is Use.STEPPED else state
        with suppress(Exception):  # the module's code need not take it
            run = run_in_use(runs, use, calls, state, after)
            exact = runs.exact(arguments, state) if use is Use.DOUBLE else None
            if run.is_finite():
                found.append(Used(use, calls, after, run, exact))
    return found


def _stepped(state: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return the state with noise on parameters, as after a step of an optimizer; buffers stay."""
    moved = perturbed_state(state, seed)
    return {name: moved[name] if isinstance(tensor, nn.Parameter) else tensor for name, tensor in state.items()}


def _sensible(runs: ReferenceRuns) -> list[Use]:
    """Return the uses that tell something of a module: those of gradients and float64 need these."""
    is_trained = runs.gradients and runs.of_inputs and runs.wide is not None and bool(runs.harness.parameters)
    return [
        *([Use.DOUBLE] if runs.wide is torch.float64 else []),
        *([Use.FROZEN] if is_trained else []),
        *([Use.STEPPED] if runs.harness.parameters else []),
    ]
