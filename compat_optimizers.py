"""What constructors of optimizers set besides the flags of their groups: private names of torch.optim."""

from __future__ import annotations

from torch.optim import Optimizer

__all__ = ["note_fused"]

_OF_FUSED = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")


def note_fused(optimizer: Optimizer, fused: bool) -> None:
    """Set what `fused=True` sets in a constructor: that a step takes a GradScaler's scale; or take it away again."""
    for name in _OF_FUSED:
        if fused:
            setattr(optimizer, name, True)
        else:
            vars(optimizer).pop(name, None)
