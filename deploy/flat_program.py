"""What a standalone archive says beside its weights: what the model holds, what it computes, and in which modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ..errors import ArchiveError, StateError
from ..passes.state_map import StateMap
from .flat_code import FlatCode, json_list, json_object
from .flat_tree import VECTORIZED, HeldModule, HeldTensor
from .held_members import member_from_json
from .values import decode, encode

__all__ = ["FlatProgram"]

_MODES = {"eval": False, "train": True}


@dataclass(frozen=True)
class FlatProgram:
    """Describe a flat model without its weights.

    Attributes:
        code: what it computes.
        modules: every module, before those inside it.
        tensors: in the order of the state dict; tied ones after the first.
        modes: the values of `training` for which there is a graph.
        training: the names of modules in training mode.
        state_map: from the names that the model had before it was optimized.
    """

    code: FlatCode
    modules: Sequence[HeldModule]
    tensors: Sequence[HeldTensor]
    modes: frozenset[bool]
    training: frozenset[str]
    state_map: StateMap

    def to_json(self) -> dict[str, Any]:
        """Return the program as plain JSON values.

        Raises:
            ArchiveError: if it holds what archives do not.
        """
        return {
            "code": self.code.to_json(),
            "modules": [_module_to_json(module) for module in self.modules],
            "tensors": [_tensor_to_json(tensor) for tensor in self.tensors],
            "modes": [word for word, mode in _MODES.items() if mode in self.modes],
            "training": sorted(self.training),
            "state_map": self.state_map.to_json(),
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatProgram:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return FlatProgram.from_json, (self.to_json(),)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FlatProgram:
        """Return the program that `to_json` described.

        Raises:
            ArchiveError: if the description is malformed, or names what is not allowed.
        """
        modules = [_module_from_json(json_object(item)) for item in json_list(data, "modules")]
        tensors = [_tensor_from_json(json_object(item)) for item in json_list(data, "tensors")]
        code = FlatCode.from_json(data.get("code"))
        _check_names(code, modules, tensors)
        modes = frozenset(mode for word, mode in _MODES.items() if word in json_list(data, "modes"))
        if not modes:
            raise ArchiveError("the model has a graph for no mode")
        training = frozenset(name for name in json_list(data, "training") if isinstance(name, str))
        try:
            state_map = StateMap.from_json(data.get("state_map"))
        except StateError as error:
            raise ArchiveError(f"its state map is malformed: {error}") from error
        return cls(code, modules, tensors, modes, training, state_map)


def _check_names(code: FlatCode, modules: Sequence[HeldModule], tensors: Sequence[HeldTensor]) -> None:
    """Make sure that what the graphs read and call is there."""
    modes = {f"{module.name}.training" if module.name else "training" for module in modules}
    missing = set(code.attributes) - modes - {tensor.name for tensor in tensors}
    missing |= set(code.modules) - {module.name for module in modules if module.kind is not None}
    if missing:
        raise ArchiveError(f"the model does not hold {min(missing)!r}")


def _module_to_json(module: HeldModule) -> dict[str, Any]:
    data: dict[str, Any] = {"name": module.name}
    if module.same is not None:
        return {**data, "same": module.same}
    if module.kind is not None:
        data |= {"class": module.kind, "settings": {key: encode(value) for key, value in module.settings.items()}}
    if module.member is not None:
        data |= module.member.to_json()
    return data


def _module_from_json(fields: Mapping[str, Any]) -> HeldModule:
    name, same, kind = fields.get("name"), fields.get("same"), fields.get("class")
    if not isinstance(name, str) or not isinstance(same, (str, type(None))) or not isinstance(kind, (str, type(None))):
        raise ArchiveError("a module is malformed")
    settings = {key: decode(value) for key, value in json_object(fields.get("settings", {})).items()}
    if kind != VECTORIZED:
        return HeldModule(name, same, kind, settings)
    in_dims: Any = settings.get("in_dims")
    count = len(cast("tuple[Any, ...]", in_dims)) if isinstance(in_dims, tuple) else 0
    return HeldModule(name, same, kind, settings, member_from_json(fields, count))


def _tensor_to_json(tensor: HeldTensor) -> dict[str, Any]:
    data: dict[str, Any] = {"name": tensor.name}
    if tensor.same is not None:
        data["same"] = tensor.same
    if tensor.strides is not None:
        data["strides"] = list(tensor.strides)
    if tensor.is_parameter:
        return {**data, "kind": "parameter", "requires_grad": tensor.flag}
    return {**data, "kind": "buffer", "persistent": tensor.flag}


def _tensor_from_json(fields: Mapping[str, Any]) -> HeldTensor:
    name, same, kind = fields.get("name"), fields.get("same"), fields.get("kind")
    flag = fields.get("requires_grad" if kind == "parameter" else "persistent")
    if not isinstance(name, str) or not isinstance(same, (str, type(None))) or type(flag) is not bool:
        raise ArchiveError("a tensor is malformed")
    if kind not in ("parameter", "buffer"):
        raise ArchiveError(f"{kind!r} is no kind of tensor")
    return HeldTensor(name, same, kind == "parameter", flag, _strides(fields))


def _strides(fields: Mapping[str, Any]) -> tuple[int, ...] | None:
    if "strides" not in fields:
        return None
    strides = json_list(fields, "strides")
    if not all(type(stride) is int and 0 < stride < 2**62 for stride in strides):
        raise ArchiveError("a tensor's strides are malformed")
    return tuple(strides)
