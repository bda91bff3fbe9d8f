"""States of models whose tensors are sharded or in parts, and states that are handed to `torch.func`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from ...compat import all_modules
from ...compat.distributed import shard_again
from ...errors import StateError
from ..values import is_sharded, tensors_by_name, whole_tensor
from .state_map import StateMap, listing

__all__ = [
    "InParts", "all_parameters", "functional_state", "gathered", "leave_to_other_ranks", "refuse_sharded",
    "sharded_like", "sharded_state", "whole_state", "writes_files",
]  # fmt: skip


class InParts(ABC, nn.Module):
    """A part of a model; other ranks hold the others."""

    @abstractmethod
    def whole_state_dict(self) -> dict[str, Any]:
        """Return the state of all parts under the original names; every rank calls this, and gets it all."""

    @abstractmethod
    def parameters_elsewhere(self) -> dict[str, nn.Parameter]:
        """Return, by name, stand-ins for the parameters of other ranks: they have shapes, and no data."""


def all_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by name; of one in parts with stand-ins for those of other ranks."""
    elsewhere = model.parameters_elsewhere() if isinstance(model, InParts) else {}
    return {**elsewhere, **dict(model.named_parameters(remove_duplicate=not elsewhere))}


def leave_to_other_ranks(optimizer: Optimizer, model: nn.Module) -> None:
    """Take out of an optimizer, in place, the parameters of other ranks, and what it knows of them."""
    elsewhere = set(model.parameters_elsewhere().values() if isinstance(model, InParts) else ())
    for group in optimizer.param_groups if elsewhere else ():
        kept = [number for number, parameter in enumerate(group["params"]) if parameter not in elsewhere]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][number] for number in kept]
    for parameter in elsewhere:
        optimizer.state.pop(parameter, None)


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model; of one in parts that of all, for which every rank has to call this."""
    return model.whole_state_dict() if isinstance(model, InParts) else model.state_dict()


State = TypeVar("State", bound=Mapping[str, Any])


def gathered(state: Mapping[str, Any], state_map: StateMap, *, whole: bool = True) -> dict[str, Any]:
    """Return the state dict of an optimized model under the original names.
    Every rank calls it where tensors are sharded. Unless `whole`, only tensors that are merged or cut are gathered.
    """
    wanted = (name for name, value in state.items() if is_sharded(value) and (whole or name in state_map.origins))
    moved = {name: whole_tensor(state[name]) for name in wanted}  # in the same order on every rank
    if not moved:
        return dict(state)
    # The others have their original names already.
    parts = state_map.backward(moved) | {name: value for name, value in state.items() if name not in moved}
    return {name: parts.pop(name) for name in state_map.names if name in parts} | parts


def sharded_like(value: Tensor, example: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, laid out as `example` is; what is sharded already stays as it is."""
    if not is_sharded(example) or is_sharded(value):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    target = cast("DTensor", example)
    whole = value.detach().to(target.device)
    # Every rank has the whole tensor: nothing needs to be sent.
    return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)


def sharded_state(model: nn.Module, state_map: StateMap, state: State) -> State | dict[str, Any]:
    """Return a state dict with original or new names and whole tensors as a sharded model takes it.
    Raises a StateError if only some tensors are given that are one sharded tensor now.
    """
    current = _stored(model)
    if not any(map(is_sharded, current.values())):
        return state
    renamed = state_map.forward(state, strict=False)
    return {name: sharded_like(value, current[name]) if name in current else value for name, value in renamed.items()}


def writes_files(model: nn.Module) -> bool:
    """Say whether this process writes a model's files: of the ranks that share a sharded one, the first does."""
    from torch import distributed

    is_shared = isinstance(model, InParts) or any(map(is_sharded, _stored(model).values()))
    return not is_shared or distributed.get_rank() == 0


def refuse_sharded(model: nn.Module, what: str, advice: str) -> None:
    """Raise a StateError if a model has sharded tensors, for what needs whole ones."""
    if isinstance(model, InParts):
        raise StateError(f"the model is in parts on several ranks, and {what}; {advice}")
    for name, tensor in _stored(model).items():
        if is_sharded(tensor):
            raise StateError(f"'{name}' is sharded, and {what}; {advice}")


def _stored(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a model keeps; FSDP2 leaves others in their place after a forward, which it will free."""
    for module in all_modules(model):
        shard_again(module)
    return tensors_by_name(model)


def functional_state(state: Mapping[str, Tensor], state_map: StateMap, model: nn.Module) -> dict[str, Tensor]:
    """Return tensors with original names under new names, with gradients from merged tensors to those given; the model
    supplies what is absent. StateError, by original name, for a wrong name or shape, or a sharded model.
    """
    refuse_sharded(model, "translating a state needs whole tensors", "use torch.func.functional_call before sharding")
    current = tensors_by_name(model)
    known = state_map.backward(current, warn=False)
    aliases = {name for pair in state_map.aliases for name in pair}
    unknown = [name for name in state if not (name in known or name in current or name in aliases)]
    if unknown:
        raise StateError(f"the model has no parameter or buffer {listing(unknown)}, and had none when it was optimized")
    return state_map.forward(state, current, strict=False, differentiable=True)
