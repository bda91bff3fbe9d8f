"""Save and load the members of a fused ensemble under their own names, each its slices of the stacked tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import modules_by_name, transient_buffers
from ..compat.distributed import shard_again
from ..errors import FusedMemberError
from ..runtime.state import SETTLED, KeepsOriginalNames, Loading, cut_from_sharded
from ..runtime.values import is_sharded, qualified
from .slices import MEMBERS, View
from .views import views_of

__all__ = ["SavesSlices", "SavesWhatMembersDoNot", "count_slices"]

_SAVED_BY_MEMBERS = "_fxopt_saved_by_members"
"""In the `__dict__` of a module with stacked tensors: name of one -> how many of its slices members read."""


def count_slices(views: Iterable[View], by: int) -> None:
    """Note that there are `by` more readers of slices, or fewer if negative."""
    for view in views:
        counts: dict[str, int] = view.store.__dict__.setdefault(_SAVED_BY_MEMBERS, {})
        counts[view.name] = counts.get(view.name, 0) + by


def saved_by_members(store: nn.Module, name: str, stacked: Tensor | None) -> bool:
    """Say whether the members save a stacked tensor; a sharded one cannot be cut, and is saved whole."""
    if stacked is None or is_sharded(stacked):
        return False
    count = store.__dict__.get(MEMBERS, {}).get(name) or (stacked.shape[0] if stacked.ndim else 0)
    return count > 0 and store.__dict__.get(_SAVED_BY_MEMBERS, {}).get(name, 0) >= count


class SavesWhatMembersDoNot(nn.Module):
    """Mix into a module that holds stacked tensors: what the members save has no name of its own in a state dict."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._saved_elsewhere():
            destination.pop(prefix + name, None)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        loading, missing = Loading(*args, **kwargs), list[str]()
        super()._load_from_state_dict(*loading._replace(missing_keys=missing))
        elsewhere = {loading.prefix + name for name in self._saved_elsewhere()}
        loading.missing_keys.extend(name for name in missing if name not in elsewhere)

    def _saved_elsewhere(self) -> list[str]:
        tensors = {**self._parameters, **self._buffers}
        return [name for name, tensor in tensors.items() if saved_by_members(self, name, tensor)]


class SavesSlices(KeepsOriginalNames):
    """Mix into the class of a member: slices are saved and loaded as if they were tensors of its own."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if not args and kwargs.get("destination") is None:
            _refuse_sharded(self)
        return super().state_dict(*args, **kwargs)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        views = {name: view for name, view in _sharded_again(self).items() if _is_saved(self, name, view)}
        if not views:
            return
        for name in (*self._parameters, *self._buffers, "_extra_state"):
            key = prefix + name
            if name in views:
                destination[key] = views[name].read() if keep_vars else _saved(views[name])
            elif key in destination:
                destination[key] = destination.pop(key)  # the order is that of the registers

    def _fxopt_before_loading(self, *loading: Any) -> None:
        super()._fxopt_before_loading(*loading)
        given = Loading(*loading)
        for name, view in _sharded_again(self).items():
            key = given.prefix + name
            value = given.state_dict.get(key)
            if value is not None:
                del given.state_dict[key]
            elif _is_saved(self, name, view):
                given.missing_keys.append(key)
            if value is not None and value is not SETTLED:
                _load(key, view, value, given)


def _sharded_again(module: nn.Module) -> Mapping[str, View]:
    """Return the slices that a member reads, of what is stored: saving frees what FSDP2 gathered for a forward."""
    views = views_of(module)
    for store in {view.store for view in views.values()}:
        shard_again(store)
    return views


def _is_saved(module: nn.Module, name: str, view: View) -> bool:
    """Say whether a slice belongs into the state dict of the module that reads it."""
    stacked = view.stacked
    return not (name in transient_buffers(module) or is_sharded(stacked) or saved_by_members(module, name, stacked))


def _refuse_sharded(module: nn.Module) -> None:
    """Raise a FusedMemberError where sharded members are saved by themselves: nothing of them would be saved."""
    inside = modules_by_name(module)
    stores = set(map(id, inside.values()))
    for path, child in inside.items():
        for name, view in _sharded_again(child).items():
            if is_sharded(view.stacked) and id(view.store) not in stores:
                raise FusedMemberError(
                    f"'{qualified(path, name)}' is a part of a sharded tensor, and this {type(module).__name__} cannot "
                    "be saved by itself; fxopt.state_dict(model) gathers the original tensors of the whole model"
                )


def _saved(view: View) -> Tensor:
    """Return a slice for a state dict, of the model's memory but with a storage of its own."""
    slice_ = view.of(view.stacked.detach())
    if not slice_.is_contiguous():
        return slice_.contiguous()
    if type(slice_) is Tensor and slice_.device.type in ("cpu", "cuda") and not slice_.is_quantized:
        slice_.data = torch.from_dlpack(slice_)
    return slice_


def _load(key: str, view: View, value: Any, given: Loading) -> None:
    """Write a tensor into a slice, or say in torch's words why it cannot be."""
    if is_sharded(view.stacked):
        given.error_msgs.append(cut_from_sharded(key))
        return
    current = view.of(view.stacked.detach())
    if not isinstance(value, Tensor) or value.shape != current.shape:
        found = value.shape if isinstance(value, Tensor) else type(value).__name__
        given.error_msgs.append(
            f"size mismatch for {key}: copying a param with shape {found} from checkpoint, "
            f"the shape in current model is {current.shape}."
        )
    elif given.assigns and (value.dtype, value.device) != (current.dtype, current.device):
        given.error_msgs.append(
            f"'{key}' is a slice of a stacked parameter and cannot be assigned another dtype or device by itself; load "
            "the whole model, or leave assign=True out."
        )
    else:
        current.copy_(value)
