"""The whole model, after all passes: compared with the original, and timed."""

from __future__ import annotations

from .finishing import finished
from .handed_over import HandedOver
from .timed import WholeModel

__all__ = ["HandedOver", "WholeModel", "finished"]
