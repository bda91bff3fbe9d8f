"""Check captured modules against the model's own forward, and give up those that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .captured import Capture, install, uninstall
from .inputs import Inputs
from .preserve import ModelState, restoring
from .record import Recording, copy_inputs
from .structure import tensors_in

__all__ = ["disagreeing"]


def disagreeing(
    model: nn.Module,
    captured: dict[str, Capture],
    inputs: Sequence[Inputs],
    recording: Recording,
    state: ModelState,
) -> list[str]:
    """Return the names of the captured modules without which the model gives what its own forward gave.

    Args:
        model: the model, its captures installed.
        captured: name -> capture, outermost first.
        inputs: the example inputs.
        recording: what the model's own forward gave on them.
        state: put back after each run.
    """
    if _agrees(model, inputs, recording, state):
        return []
    modules = {name: model.get_submodule(name) for name in captured}
    for name, module in modules.items():
        uninstall(module)
        if _agrees(model, inputs, recording, state):
            return [name]
        install(module, captured[name])
    return list(captured)


def _agrees(model: nn.Module, inputs: Sequence[Inputs], recording: Recording, state: ModelState) -> bool:
    with restoring(state), torch.set_grad_enabled(recording.grad):
        for call, recorded in zip(inputs, recording.calls[model], strict=True):
            copy = copy_inputs(call, grad=recording.grad)
            try:
                given = model(*copy.args, **copy.kwargs)
            except Exception:  # noqa: BLE001  the model's own forward ran on these inputs, so the graph is at fault
                return False
            if not same_outputs(given, recorded.output):
                return False
    return True


def same_outputs(given: Any, expected: Any) -> bool:
    """Tell whether two outputs hold the same tensors up to the last bits, in the same structure."""
    if type(given) is not type(expected):
        return False
    pairs = list(zip(tensors_in(given), tensors_in(expected), strict=False))
    counted = sum(1 for _ in tensors_in(given)), sum(1 for _ in tensors_in(expected))
    return counted[0] == counted[1] and all(_same(a, b) for a, b in pairs)


def _same(given: Tensor, expected: Tensor) -> bool:
    if given.shape != expected.shape or given.dtype != expected.dtype or given.device != expected.device:
        return False
    if given.is_meta or given.layout is not torch.strided:
        return True
    if given.is_floating_point() or given.is_complex():
        tolerance = 64 * torch.finfo(given.dtype).eps
        return torch.allclose(given, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    return torch.equal(given, expected)
