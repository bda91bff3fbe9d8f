"""The whole model: rewrites verified on it together; after all passes it is compared, timed, its memory measured."""

from __future__ import annotations

from .batch_verifier import BatchVerifier
from .contest import Contest
from .final_check import FinalCheck
from .finishing import finished
from .memory import measured_memory, memory_figures
from .sizes import with_other_sizes
from .timed import WholeModel

__all__ = [
    "BatchVerifier",
    "Contest",
    "FinalCheck",
    "WholeModel",
    "finished",
    "measured_memory",
    "memory_figures",
    "with_other_sizes",
]
