"""The capture of a model on the example calls, and on those that it makes of itself while it generates."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...errors import InputError
from ..examples import Generating, Inputs
from ..recording import NO_STEP, calls_of_generate, generated_calls
from .program import Program, capture_program

__all__ = ["captured_on"]


def captured_on(model: nn.Module, inputs: Sequence[Inputs], *, training: bool) -> tuple[Program, str]:
    """Give a copy of the user's model its graphs, for calls of its own `generate`, too; say so where it has none."""
    given = [call for each in inputs for call in _calls(model, each)]
    added, remark = ([], "") if training or len(given) != len(inputs) else calls_of_generate(model, given)
    if added:
        try:
            return capture_program(model, [*given, *added], training=training), remark
        except InputError as error:
            remark = f"{NO_STEP}: {error}"
    return capture_program(model, given or None, training=training), remark


def _calls(model: nn.Module, call: Inputs) -> list[Inputs]:
    return generated_calls(model, call) if isinstance(call, Generating) else [call]
