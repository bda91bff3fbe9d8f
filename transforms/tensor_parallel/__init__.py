"""Tensor parallelism: the search for layers that can be split together, and torch's styles for them."""

from __future__ import annotations

from .prepare import prepare
from .tensor_parallel import TensorParallel, blocks_in
from .vocabulary import vocabularies_in

__all__ = ["TensorParallel", "blocks_in", "prepare", "vocabularies_in"]
