"""Modules some of whose weights are zero for good, and the kernels that gain by it."""

from __future__ import annotations

from .module import Masked, gone_attribute, gone_of, has_only_masks, masked_module, set_gone, unmask
from .semi_structured import packed_weight, reason_against_sparse, set_sparse

__all__ = [
    "Masked", "gone_attribute", "gone_of", "has_only_masks", "masked_module", "packed_weight",
    "reason_against_sparse", "set_gone", "set_sparse", "unmask",
]  # fmt: skip
