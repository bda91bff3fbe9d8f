"""Message passing of PyTorch Geometric over compressed rows of the graph."""

from __future__ import annotations

from .module import CompressedMessages, compressed, is_compressed
from .supported import CONVOLUTIONS, not_supported

__all__ = ["CONVOLUTIONS", "CompressedMessages", "compressed", "is_compressed", "not_supported"]
