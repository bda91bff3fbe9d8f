"""Compute the convolutions of graph networks over compressed rows."""

from __future__ import annotations

from .sparse_message_passing import SparseMessagePassing

__all__ = ["SparseMessagePassing"]
