"""Which layers the kernels for sparse tensor cores take."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from fxopt.layers.masked import reason_against_sparse


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Linear(64, 32), "16-bit floats"),
        (nn.Linear(60, 32).half(), "rows in multiples of 32 and columns of 64"),
        (nn.Conv2d(64, 32, 1).half(), "for linear layers"),
        (nn.Linear(64, 32).half(), None),
    ],
)
def test_what_the_kernel_takes(layer: nn.Module, reason: str | None) -> None:
    class OnCuda(Tensor):
        is_cuda = True  # pyright: ignore[reportAssignmentType]

    found = reason_against_sparse(layer, layer.weight.detach().as_subclass(OnCuda))  # pyright: ignore[reportCallIssue]
    assert found is None if reason is None else reason in str(found)
