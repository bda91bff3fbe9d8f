"""The whole model: rewrites verified on it together; after all passes it is compared, timed, its memory measured."""

from __future__ import annotations

from .finishing import finished
from .handed_over import HandedOver
from .memory import measured_memory, memory_figures
from .sizes import with_other_sizes
from .timed import WholeModel
from .together import Together

__all__ = ["HandedOver", "Together", "WholeModel", "finished", "measured_memory", "memory_figures", "with_other_sizes"]
