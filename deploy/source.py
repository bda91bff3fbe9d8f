"""What the command line needs beside a model's code: its weights and its example inputs, from files without pickles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..errors import InputError, UsageError, one_line
from .factory import import_module, module_of

__all__ = ["inputs_beside", "load_weights", "read_inputs"]

BESIDE = "example_inputs"
_PICKLES = {".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"}


def inputs_beside(spec: str) -> object:
    """Return what `example_inputs()` in the factory's module returns, or None if there is no such function.

    Raises:
        InputError: it raises.
    """
    function: Any = getattr(import_module(module_of(spec)), BESIDE, None)
    if function is None:
        return None
    try:
        return function() if callable(function) else function
    except (Exception, SystemExit) as error:
        raise InputError(f"{module_of(spec)}:{BESIDE} raised {type(error).__name__}: {one_line(error)}") from error


def read_inputs(path: Path) -> tuple[Tensor, ...] | dict[str, Tensor]:
    """Return example inputs from a safetensors file: positional if the names are 0, 1, 2 ..., else keywords.

    Raises:
        UsageError: the file is a pickle by its name.
        InputError: it cannot be read.
    """
    tensors = _tensors(path, "example inputs")
    positions = [str(i) for i in range(len(tensors))]
    return tuple(tensors[i] for i in positions) if set(positions) == set(tensors) else tensors


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a safetensors file into a model, every name matched; tied tensors may be there under one name only.

    Raises:
        UsageError: the file is a pickle by its name.
        InputError: it cannot be read, or does not fit the model.
    """
    state = _tensors(path, "weights")
    try:
        model.load_state_dict(_with_tied(model, state))
    except RuntimeError as error:
        raise InputError(f"the weights in {path} do not fit the model: {one_line(error)}") from error


def _with_tied(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the names under which the model holds a tensor that the file has under another name."""
    complete = dict(state)
    names: dict[int, str] = {id(t): name for name, t in model.state_dict(keep_vars=True).items() if name in state}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in complete and id(tensor) in names:
            complete[name] = state[names[id(tensor)]]
    return complete


def _tensors(path: Path, what: str) -> dict[str, Tensor]:
    if path.suffix.lower() in _PICKLES:
        raise UsageError(
            f"{path} looks like a pickle, which runs code when it is read; save the {what} with safetensors instead"
        )
    try:
        return safetensors.torch.load_file(path)
    except (OSError, LookupError, ValueError, TypeError, RuntimeError, OverflowError, SafetensorError) as error:
        raise InputError(f"{path} is not a readable safetensors file: {one_line(error)}") from error
