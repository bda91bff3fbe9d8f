"""Let a rewritten model load checkpoints that carry the original names, at the root and inside larger models alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from .state_map import StateMap

__all__ = ["RECORD_KEY", "LoadsOriginalNames", "translate_on_load"]

RECORD_KEY = "_fxopt_record"
"""Where the root of an optimized model keeps its record, in its `__dict__`."""


class LoadsOriginalNames(nn.Module):
    """Mix into the class of an optimized model's root, so that `load_state_dict` takes old checkpoints and new ones.

    State dicts are saved under the new names; `fxopt.state_dict` gives the original ones.
    """

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        record = self.__dict__.get(RECORD_KEY)
        if record is not None:
            translate_on_load(self, record.state_map, state_dict, prefix, missing_keys, error_msgs)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def translate_on_load(
    module: nn.Module,
    state_map: StateMap,
    state_dict: dict[str, Any],
    prefix: str,
    missing_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Replace original names by new ones in a state dict that is being loaded; do nothing if it has new ones already.

    What does not fit is reported as PyTorch reports it, by original name: absent tensors keep their current values and
    go to `missing_keys`, wrong shapes to `error_msgs`. What is unexpected stays, for PyTorch to find.

    Args:
        module: the optimized model.
        state_map: from the original names to the module's.
        state_dict: what `load_state_dict` works on, changed in place.
        prefix: where the module is in the model that loads, "" or ending in a dot.
        missing_keys: `load_state_dict`'s own list, appended to.
        error_msgs: `load_state_dict`'s own list, appended to.
    """
    given = {name[len(prefix) :]: value for name, value in state_dict.items() if name.startswith(prefix)}
    resolved = state_map.resolve_aliases(given)
    if not state_map.sources.intersection(resolved):
        return
    loading = _Loading(module, state_map, resolved, prefix, missing_keys, error_msgs)
    translated = loading.translate()
    for name in given.keys() - resolved.keys() | loading.used:
        state_dict.pop(prefix + name, None)
    state_dict.update({prefix + name: tensor for name, tensor in translated.items()})


@dataclass
class _Loading:
    """One module's part of one call of `load_state_dict`."""

    module: nn.Module
    state_map: StateMap
    given: Mapping[str, Tensor]
    prefix: str
    missing_keys: list[str]
    error_msgs: list[str]

    def __post_init__(self) -> None:
        self.used: set[str] = set()
        self.judged: dict[str, bool] = {}

    def translate(self) -> dict[str, Tensor]:
        """Return the merged tensors by new name."""
        current = {name: _tensor(self.module, name) for name in self.state_map.targets}
        known = self.state_map.backward(current)
        values: dict[str, Tensor] = {}
        translated: dict[str, Tensor] = {}
        for target, names in self.state_map.origins.items():
            if target in self.given:
                continue
            self.used.update(names)
            found = {name: self.given[name] for name in names if self._fits(name, known[name])}
            if found:
                values.update(
                    _alike({name: found.get(name, known[name]) for name in names}, next(iter(found.values())))
                )
            else:
                # The tensor itself, so that loading it (assigning, too) changes nothing.
                translated[target] = current[target]
        return self.state_map.forward(values, strict=False) | translated

    def _fits(self, name: str, current: Tensor) -> bool:
        """Say whether an original tensor is given and has its shape; what is wrong is reported once."""
        if name not in self.judged:
            self.judged[name] = self._judge(name, current)
        return self.judged[name]

    def _judge(self, name: str, current: Tensor) -> bool:
        if name not in self.given:
            self.missing_keys.append(self.prefix + name)
            return False
        if self.given[name].shape != current.shape:
            self.error_msgs.append(
                f"size mismatch for {self.prefix}{name}: copying a param with shape {self.given[name].shape} from "
                f"checkpoint, the shape in current model is {current.shape}."
            )
            return False
        return True


def _alike(tensors: Mapping[str, Tensor], example: Tensor) -> dict[str, Tensor]:
    """Bring tensors that will be merged to one device and to a dtype that loses nothing."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    return {name: tensor.to(example.device, dtype) for name, tensor in tensors.items()}


def _tensor(module: nn.Module, name: str) -> Tensor:
    path, _, last = name.rpartition(".")
    return getattr(module.get_submodule(path), last)
