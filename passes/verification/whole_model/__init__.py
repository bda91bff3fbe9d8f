"""Compare a whole model, as it is handed over, with its original."""

from __future__ import annotations

from .original import Original

__all__ = ["Original"]
