"""Modules of torch whose code runs with one width only, for any width."""

from __future__ import annotations

from .attention import ResizedAttention

__all__ = ["ResizedAttention"]
