"""States for `torch.func.functional_call`, which reads tensors where they are now: under their new names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...errors import StateError
from .state_map import StateMap, listing

__all__ = ["functional_state"]


def functional_state(
    state: Mapping[str, Tensor], state_map: StateMap, current: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return tensors with original names under new names; gradients flow from merged tensors to those given.

    Args:
        state: parameters and buffers by original name, all or some; those with new names stay as they are.
        state_map: from original to new names.
        current: all parameters and buffers of the rewritten model; they supply members that are absent.

    Raises:
        StateError: a name that the model never had, or a wrong shape, by original name.
    """
    known = state_map.backward(current)
    aliases = {name for pair in state_map.aliases for name in pair}
    unknown = [name for name in state if not (name in known or name in current or name in aliases)]
    if unknown:
        raise StateError(f"the model has no parameter or buffer {listing(unknown)}, and had none when it was optimized")
    return state_map.forward(state, current, strict=False, differentiable=True)
