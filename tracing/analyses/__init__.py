"""What is known of modules and graphs without running them: which are alike, which draw random numbers."""

from __future__ import annotations

from .random_effects import function_uses_host_random, may_draw, module_may_draw, tree_uses_host_random
from .structural_hash import Described, HashLevel, StructuralHash, numbers_of

__all__ = [
    "Described", "HashLevel", "StructuralHash", "function_uses_host_random", "may_draw", "module_may_draw",
    "numbers_of", "tree_uses_host_random",
]  # fmt: skip
