"""The whole model: rewrites verified on it together; after all passes it is compared with the original, and timed."""

from __future__ import annotations

from .finishing import finished
from .handed_over import HandedOver
from .timed import WholeModel
from .together import Together

__all__ = ["HandedOver", "Together", "WholeModel", "finished"]
