"""The whole model, after all passes: compared with the original, timed, its memory measured."""

from __future__ import annotations

from .finishing import finished
from .handed_over import HandedOver
from .memory import measured_memory, memory_figures
from .timed import WholeModel

__all__ = ["HandedOver", "WholeModel", "finished", "measured_memory", "memory_figures"]
