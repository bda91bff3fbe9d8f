"""Convolutions that were packed for one size of images, at others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.compat import packed as kernels
from fxopt.compat.packed import why_no_packing

pytestmark = pytest.mark.skipif(bool(why_no_packing(torch.float32)), reason="needs oneDNN")


def test_images_of_other_sizes_have_a_weight_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1)).eval()
    fast = fxopt.optimize(model, passes=["pack"], example_inputs=torch.randn(1, 4, 16, 16), measure=False)
    packed = list[Any]()

    def pack(*given: Any) -> Any:
        packed.append(given[-1])
        return torch.ops.mkldnn._reorder_convolution_weight(*given)

    monkeypatch.setattr(kernels, "_OPERATORS", SimpleNamespace(_reorder_convolution_weight=pack))
    for scale in (0.5, 2.0):
        packed.clear()
        with torch.no_grad():
            for module in (model, fast):
                module.get_submodule("0").weight.mul_(scale)
            for batch, size in ((1, 16), (3, 16), (1, 8), (2, 12), (1, 16)):
                x = torch.randn(batch, 4, size, size)
                torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
        assert packed == [(1, 4, 16, 16), None]
