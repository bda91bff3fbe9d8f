"""What a CPU must have for a test to mean something."""

from __future__ import annotations

import pytest
import torch

from fxopt.compat.packed import why_no_packing
from fxopt.compat.quantized import why_no_static_int8

__all__ = ["needs_bfloat16", "needs_static_int8"]

needs_bfloat16 = pytest.mark.skipif(bool(why_no_packing(torch.bfloat16)), reason=why_no_packing(torch.bfloat16))
"""Marks tests of what bfloat16 loses: engines compute in float32 where the CPU has no instructions for it."""

needs_static_int8 = pytest.mark.skipif(bool(why_no_static_int8()), reason=why_no_static_int8())
"""Marks tests that run layers in int8 with fixed ranges."""
