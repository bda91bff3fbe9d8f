"""What the command line needs beside a model's code: its weights and its example inputs, from files without pickles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..errors import InputError, one_line
from ..settings import weights_only
from .configurations import inputs_for
from .factory import import_module, module_of

__all__ = ["inputs_beside", "load_weights", "read_inputs"]

BESIDE = "example_inputs"
_PICKLES = {".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"}


def inputs_beside(spec: str, model: nn.Module | None = None) -> object:
    """Return what `example_inputs()` in the factory's module returns.

    Without such a function, return inputs drawn for a `model` of `transformers`, or None.
    """
    function: Any = getattr(import_module(module_of(spec)), BESIDE, None)
    if function is None:
        return None if model is None else inputs_for(model)
    try:
        return function() if callable(function) else function
    except (Exception, SystemExit) as error:
        raise InputError(f"{module_of(spec)}:{BESIDE} raised {type(error).__name__}: {one_line(error)}") from error


def read_inputs(path: Path) -> object:
    """Return example inputs from a file; tensors of a safetensors file are positional if the names are 0, 1, 2 ..."""
    if path.suffix.lower() in _PICKLES:
        return _unpickled(path)
    tensors = _tensors(path)
    positions = [str(i) for i in range(len(tensors))]
    return tuple(tensors[i] for i in positions) if set(positions) == set(tensors) else tensors


def load_weights(model: nn.Module, path: Path) -> None:
    """Load safetensors, or a state dict that `torch.save` wrote, every name matched; tied tensors may be there once."""
    state = _state(path) if path.suffix.lower() in _PICKLES else _tensors(path)
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


def _state(path: Path) -> Mapping[str, Tensor]:
    found: Any = _unpickled(path)
    state: Any = cast("Mapping[str, Any]", found).get("state_dict", found) if isinstance(found, Mapping) else found
    values = list(cast("Mapping[str, Any]", state).values()) if isinstance(state, Mapping) else [None]
    if not all(isinstance(value, Tensor) for value in values):
        raise InputError(f"{path} holds no state dict; write one with torch.save(model.state_dict(), path)")
    return cast("Mapping[str, Tensor]", state)


def _unpickled(path: Path) -> object:
    """Return what `torch.save` wrote, tensors and plain values only: nothing in the file is run."""
    try:
        with weights_only():
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of many kinds, where a file is damaged or asks for classes
        advice = "save a state dict, or tensors, with torch.save or safetensors"
        raise InputError(f"{path} cannot be read without running code in it, or is damaged; {advice}") from error


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (OSError, LookupError, ValueError, TypeError, RuntimeError, OverflowError, SafetensorError) as error:
        raise InputError(f"{path} is not a readable safetensors file: {one_line(error)}") from error
