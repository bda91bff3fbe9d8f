"""What a CPU must have for a test to mean something."""

from __future__ import annotations

import pytest

from fxopt.compat.quantized import why_no_static_int8

__all__ = ["needs_static_int8"]

needs_static_int8 = pytest.mark.skipif(bool(why_no_static_int8()), reason=why_no_static_int8())
"""Marks tests that run layers in int8 with fixed ranges."""
