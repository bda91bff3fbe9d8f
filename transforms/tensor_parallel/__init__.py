"""Tensor parallelism: the search for layers that can be split together, and torch's styles for them."""

from __future__ import annotations

from .tensor_parallel import TensorParallel, blocks_in

__all__ = ["TensorParallel", "blocks_in"]
