"""What the user gets: the optimized or the restored model, and with it all that trains or lists its parameters."""

from __future__ import annotations

from .handing_over import hand_over, restored
from .optimizer_moves import check_optimizer, move_optimizer
from .tensor_hooks import lost_hooks_text

__all__ = ["check_optimizer", "hand_over", "lost_hooks_text", "move_optimizer", "restored"]
