"""States for `torch.func.functional_call`, which reads tensors where they are now: under their new names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ...errors import StateError
from ..values import tensors_by_name
from .sharding import refuse_sharded
from .state_map import StateMap, listing

__all__ = ["functional_state"]


def functional_state(state: Mapping[str, Tensor], state_map: StateMap, model: nn.Module) -> dict[str, Tensor]:
    """Return tensors with original names under new names; gradients flow from merged tensors to those given.
    The model supplies what is absent. Raises a StateError, by original name, for a wrong name or shape, or a sharded
    model.
    """
    refuse_sharded(model, "translating a state needs whole tensors", "use torch.func.functional_call before sharding")
    current = tensors_by_name(model)
    known = state_map.backward(current)
    aliases = {name for pair in state_map.aliases for name in pair}
    unknown = [name for name in state if not (name in known or name in current or name in aliases)]
    if unknown:
        raise StateError(f"the model has no parameter or buffer {listing(unknown)}, and had none when it was optimized")
    return state_map.forward(state, current, strict=False, differentiable=True)
