"""Layers of `quantize{scheme=int8_static}` for tests, with calibration data, as small as they get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

import fxopt
from fxopt.transforms.quantize import Quantize

__all__ = ["with_method"]


def with_method(model: nn.Module, method: Any, seen: Sequence[Tensor], **options: Any) -> Any:
    """Quantize by a method, whatever the time, on calibration data that was `seen`."""
    options = {"calibration": seen, "aim": "size", "budget": 0.9, "observer": "minmax", **options}
    example = (options["calibration"][0],)
    return fxopt.optimize(model, Quantize("int8_static", method=method, **options), example_inputs=example)
