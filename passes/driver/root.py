"""What sets some modules of an optimized model apart: the root has the record, state maps are where tensors moved."""

from __future__ import annotations

from torch import nn

from ...compat import submodule
from ...runtime.graphs import Capture, capture_of, install, uninstall
from ...runtime.record import Record
from ...runtime.state import RECORD_KEY, STATE_MAP, KeepsOriginalNames, StateMap, checkpointing_class

__all__ = ["make_root", "remember"]


def make_root(model: nn.Module, record: Record) -> None:
    """Make `model` the root of an optimized model, whether or not its original forward could be captured."""
    for path, state_map in {"": StateMap(names=record.state_map.names), **record.state_map.apart()}.items():
        module = submodule(model, path)
        if module is not None:
            _keep_original_names(module, state_map)
    model.__dict__[RECORD_KEY] = record


def remember(model: nn.Module, record: Record) -> None:
    """Let an optimized model have another record: tensors of the same names, mapped otherwise."""
    for path, state_map in {"": StateMap(names=record.state_map.names), **record.state_map.apart()}.items():
        module = submodule(model, path)
        if module is not None:
            module.__dict__[STATE_MAP] = state_map
    model.__dict__[RECORD_KEY] = record


def _keep_original_names(module: nn.Module, state_map: StateMap) -> None:
    capture = capture_of(module)
    uninstall(module, keep_regions=True)
    if not isinstance(module, KeepsOriginalNames):
        object.__setattr__(module, "__class__", checkpointing_class(type(module)))
    install(module, capture or Capture(type(module), []))
    module.__dict__[STATE_MAP] = state_map
