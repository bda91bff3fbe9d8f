"""State dicts under the original names, of an optimized model and of every module in it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...compat import modules_by_name, own_buffers, submodule, transient_buffers
from ...compat.distributed import shard_again
from ...errors import StateError
from ..values import class_recipe, is_sharded, subclass, user_class
from .state_map import StateMap, warn_of_zeros

__all__ = [
    "ADDED_TENSORS", "RECORD_KEY", "SETTLED", "STATE_MAP", "VIEWS", "KeepsOriginalNames", "Loading",
    "absent_from_checkpoints", "checkpointing_class", "cut_from_sharded", "translate_on_load", "translate_saved",
]  # fmt: skip

RECORD_KEY = "_fxopt_record"
"""Where the root of an optimized model keeps its record, in its `__dict__`."""

STATE_MAP = "_fxopt_state_map"
"""Where the innermost module around tensors that moved keeps their map, by names as it sees them."""

VIEWS = "_fxopt_views"
"""Where a module lists, by name, the tensors of its own that it reads from others; it saves and loads them itself."""

ADDED_TENSORS = "_fxopt_added_tensors"
"""Where a module names tensors of its own that a pass gave it: it saves them, and loads checkpoints without them."""

SETTLED = torch.empty(0, device="meta")
"""Stands in a state dict for a tensor that a module further out has loaded, or has reported missing."""

_ZEROS: ContextVar[list[str] | None] = ContextVar("_ZEROS", default=None)
"""Of the outermost `state_dict` that runs: names of tensors with zeros in the places of what is gone."""


def absent_from_checkpoints(module: nn.Module) -> frozenset[str]:
    """Return the names of a module's own tensors that no checkpoint of the original has."""
    return frozenset((*transient_buffers(module), *getattr(module, ADDED_TENSORS, ())))


class KeepsOriginalNames(nn.Module):
    """Mix into the class of a module that has moved tensors: its state dict has the original names, and
    `load_state_dict` takes these and the new ones. Sharded tensors are saved and loaded under their new names.
    """

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        around = _ZEROS.get()
        zeros = list[str]() if around is None else around
        token = _ZEROS.set(zeros)
        try:
            saved: dict[str, Any] = cast("Any", super()).state_dict(*args, **kwargs)
            state_map: StateMap | None = self.__dict__.get(STATE_MAP)
            if state_map is not None:
                zeros += translate_saved(state_map, saved, kwargs.get("prefix", args[1] if len(args) > 1 else ""))
        finally:
            _ZEROS.reset(token)
        if around is None:
            warn_of_zeros(zeros, stacklevel=3)
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if isinstance(cast("object", state_dict), Mapping):
            _refuse_infinite(self, state_dict)
        return cast("Any", super()).load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # The user's own hooks see what was given: this one is the last.
        hooks = cast("dict[Any, Any]", self._load_state_dict_pre_hooks)
        self.__dict__["_load_state_dict_pre_hooks"] = OrderedDict({**hooks, "fxopt": self._fxopt_before_loading})
        try:
            super()._load_from_state_dict(*args, **kwargs)
        finally:
            self.__dict__["_load_state_dict_pre_hooks"] = hooks

    def _fxopt_before_loading(self, *loading: Any) -> None:
        """Translate what is given, before torch looks at it; `loading` are the fields of a `Loading`."""
        state_map: StateMap | None = self.__dict__.get(STATE_MAP)
        if state_map is not None:
            translate_on_load(self, state_map, Loading(*loading))


class Loading(NamedTuple):
    """What torch hands to each module in a call of `load_state_dict`."""

    state_dict: dict[str, Any]
    prefix: str
    local_metadata: Mapping[str, Any]
    strict: bool
    missing_keys: list[str]
    unexpected_keys: list[str]
    error_msgs: list[str]

    @property
    def assigns(self) -> bool:
        """Whether tensors are taken over instead of copied."""
        return bool(self.local_metadata.get("assign_to_params_buffers", False))


def checkpointing_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `base`, named like it, whose checkpoints have the original names."""
    return subclass(base, (KeepsOriginalNames,), lambda: _body(base), key="checkpointing")


def _body(base: type[nn.Module]) -> dict[str, Any]:
    return {
        "__init_subclass__": classmethod(_keep_quiet),
        "_fxopt_base": user_class(base),
        "_fxopt_recipe": (_checkpointing_class_of, class_recipe(base)),
    }


def _keep_quiet(cls: type, **kwargs: Any) -> None:
    """Keep the user's own hook for subclasses (registries, say) from seeing the class made here."""


def _checkpointing_class_of(make: Callable[..., type[nn.Module]], arguments: tuple[Any, ...]) -> type[nn.Module]:
    return checkpointing_class(make(*arguments))


def _refuse_infinite(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse a state dict with elements that cannot be quantized, before any of it is loaded."""
    modules: dict[str, nn.Module] = modules_by_name(module)
    for path, keeper in modules.items():
        state_map: StateMap | None = keeper.__dict__.get(STATE_MAP)
        prefix = f"{path}." if path else ""
        if state_map is None:
            continue
        for target, names in state_map.origins.items():
            holder, _, last = target.rpartition(".")
            owner = submodule(keeper, holder)
            given = {name: state[prefix + name] for name in names if isinstance(state.get(prefix + name), Tensor)}
            _check_finite(given, None if owner is None else own_buffers(owner).get(last), prefix)


def _check_finite(given: Mapping[str, Tensor], held_as: Tensor | None, prefix: str) -> None:
    if held_as is None or held_as.is_floating_point():
        return
    for name, tensor in given.items():
        if not tensor.is_meta and tensor.is_floating_point() and not tensor.isfinite().all():
            raise StateError(f"'{prefix}{name}' has elements that are not finite; it cannot be quantized")


def translate_saved(state_map: StateMap, saved: dict[str, Any], prefix: str) -> list[str]:
    """Replace new names by original ones in what `state_dict` has gathered below `prefix`, but for sharded tensors.
    Return the names of what has zeros in the places of what is gone.
    """
    found = {name: saved[prefix + name] for name in state_map.origins if prefix + name in saved}
    found = {name: tensor for name, tensor in found.items() if not is_sharded(tensor)}
    originals, zeros = state_map.with_zeros(found)
    for name in found:
        del saved[prefix + name]
    saved.update({prefix + name: tensor for name, tensor in originals.items()})
    _put_in_order(saved, [prefix + name for name in state_map.names if prefix + name in saved], prefix)
    return [prefix + name for name in zeros]


def _put_in_order(saved: dict[str, Any], names: Sequence[str], prefix: str) -> None:
    """Let what has original names come in their order; what the user has added since keeps its place."""
    known = set(names)
    if [name for name in saved if name in known] == names:
        return
    part, ordered = [name for name in saved if name.startswith(prefix)], iter(names)
    values = {name: saved.pop(name) for name in part}
    for name in part:
        name = next(ordered) if name in known else name
        saved[name] = values[name]


def translate_on_load(module: nn.Module, state_map: StateMap, loading: Loading) -> None:
    """Replace original names by new ones in a state dict that is being loaded into a module.
    What does not fit is reported as PyTorch does: absent tensors in `missing_keys`, wrong shapes in `error_msgs`.
    """
    state_dict, prefix = loading.state_dict, loading.prefix
    given = {
        name[len(prefix) :]: value
        for name, value in state_dict.items()
        if name.startswith(prefix) and value is not SETTLED
    }
    resolved = state_map.resolve_aliases(given)
    translation = _Translation(module, state_map, resolved, loading)
    translated = translation.translate()
    for name in given.keys() - resolved.keys() | translation.used:
        state_dict.pop(prefix + name, None)
    state_dict.update({prefix + name: tensor for name, tensor in translated.items()})
    aliases = {alias for alias, name in state_map.aliases if name in translation.settled}
    for name in translation.settled | aliases:
        path, _, last = name.rpartition(".")
        holder = submodule(module, path)
        if holder is not None and last in holder.__dict__.get(VIEWS, ()):
            state_dict.setdefault(prefix + name, SETTLED)


@dataclass
class _Translation:
    """One module's part of one call of `load_state_dict`: which original names were `used` or `settled`."""

    module: nn.Module
    state_map: StateMap
    given: Mapping[str, Tensor]
    loading: Loading

    def __post_init__(self) -> None:
        self.used: set[str] = set()
        self.settled: set[str] = set()
        self.judged: dict[str, bool] = {}
        self.refused = False

    def translate(self) -> dict[str, Tensor]:
        """Return the merged tensors by new name."""
        current = {name: _tensor(self.module, name) for name in self.state_map.targets}
        sharded = {name for name, tensor in current.items() if is_sharded(tensor)}
        whole = {name: tensor for name, tensor in current.items() if name not in sharded}
        known = self.state_map.backward(whole, warn=False)
        values: dict[str, Tensor] = {}
        translated: dict[str, Tensor] = {}
        for target, names in self.state_map.origins.items():
            is_new = self._is_new(target, current[target], known)
            if not is_new and self._is_left_to_members(names, current[target]):
                continue
            self.settled.update(names)
            if is_new:
                continue
            if target in sharded:
                translated |= self._refuse_sharded(target, names, current[target])
                continue
            self.used.update(names)
            found = {name: self.given[name] for name in names if self._fits(name, known[name])}
            if found:
                _check_finite(found, current[target], self.loading.prefix)
                values.update(
                    _alike({name: found.get(name, known[name]) for name in names}, next(iter(found.values())))
                )
            else:
                # The tensor itself, so that loading it (assigning, too) changes nothing.
                translated[target] = current[target]
        return self.state_map.forward(values, strict=False) | translated

    def _is_left_to_members(self, names: tuple[str, ...], stacked: Tensor) -> bool:
        """Say whether members load a tensor, each its slice: hooks of theirs may rename or convert what is given."""
        return (
            not self.loading.assigns
            and not is_sharded(stacked)
            and all(self._reads_slice(name, stacked) for name in names)
        )

    def _reads_slice(self, name: str, stacked: Tensor) -> bool:
        path, _, last = name.rpartition(".")
        holder = submodule(self.module, path)
        view = None if holder is None else holder.__dict__.get(VIEWS, {}).get(last)
        return view is not None and view.stacked is stacked

    def _is_new(self, name: str, current: Tensor, known: Mapping[str, Tensor]) -> bool:
        """Say whether a tensor is given under its new name; where that is an original name too, its shape tells."""
        given = self.given.get(name)
        if given is None or name not in known:
            return given is not None
        return given.shape == current.shape != known[name].shape

    def _refuse_sharded(self, target: str, names: tuple[str, ...], current: Tensor) -> dict[str, Tensor]:
        """Leave a sharded tensor to torch, which asks for it by its new name, unless its parts are given."""
        given = [name for name in names if name in self.given]
        self.used.update(given)
        if not given:
            return {}
        if not self.refused:
            self.loading.error_msgs.append(cut_from_sharded(self.loading.prefix + given[0]))
        self.refused = True
        return {target: current}

    def _fits(self, name: str, current: Tensor) -> bool:
        """Say whether an original tensor is given and has its shape; what is wrong is reported once."""
        if name not in self.judged:
            self.judged[name] = self._judge(name, current)
        return self.judged[name]

    def _judge(self, name: str, current: Tensor) -> bool:
        if name not in self.given:
            self.loading.missing_keys.append(self.loading.prefix + name)
            return False
        if self.given[name].shape != current.shape:
            self.loading.error_msgs.append(
                f"size mismatch for {self.loading.prefix}{name}: copying a param with shape {self.given[name].shape} "
                f"from checkpoint, the shape in current model is {current.shape}."
            )
            return False
        return True


def cut_from_sharded(name: str) -> str:
    """Say why a tensor cannot be loaded by its original name."""
    return (
        f"'{name}' is a part of a sharded tensor: fxopt.load_state_dict(model, state) distributes a state dict with "
        "original names to the whole model."
    )


def _alike(tensors: Mapping[str, Tensor], example: Tensor) -> dict[str, Tensor]:
    """Bring tensors that will be merged to one device and to a dtype that loses nothing."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    return {name: tensor.to(example.device, dtype) for name, tensor in tensors.items()}


def _tensor(module: nn.Module, name: str) -> Tensor:
    path, _, last = name.rpartition(".")
    holder = module.get_submodule(path)
    shard_again(holder)
    return getattr(holder, last)
