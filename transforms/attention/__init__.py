"""Compute attention that is written out by the operator of torch that is attention."""

from __future__ import annotations

from .attention import Attention

__all__ = ["Attention"]
