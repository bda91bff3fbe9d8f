"""Convolutions that were packed for one size of images, at others."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

import fxopt
from fxopt.compat_packed import why_no_packing

pytestmark = pytest.mark.skipif(bool(why_no_packing(torch.float32)), reason="needs oneDNN")


def test_images_of_other_sizes_have_a_weight_of_their_own() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1)).eval()
    fast = fxopt.optimize(model, passes=["pack"], example_inputs=torch.randn(1, 4, 16, 16), measure=False)
    with torch.no_grad(), torch.profiler.profile() as profile:
        for batch, size in ((1, 16), (3, 16), (1, 8), (2, 12), (1, 16)):
            x = torch.randn(batch, 4, size, size)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    names = [each.name for each in cast("Any", profile).events()]
    assert sum("_reorder_convolution_weight" in name for name in names) == 2
