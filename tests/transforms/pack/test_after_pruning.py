"""pack on models that structured pruning has made narrower: layers are tried on inputs as wide as they are now."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.compat.packed import why_no_packing
from fxopt.errors import OrderError
from fxopt.transforms.prune import remove_masks

pytestmark = pytest.mark.skipif(bool(why_no_packing(torch.float32)), reason=why_no_packing(torch.float32))

PIPELINE = "prune{method=structured,amount=0.5},pack"


def checked(x: Tensor) -> Tensor:
    """Return what it is given; what calls it has no graph."""
    return x if type(x).__name__ == "Tensor" else x * 2


class Body(nn.Module):
    """Two layers and an activation."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.first(checked(x)).relu()))


class Whole(nn.Module):
    """A body and a layer on what it gives."""

    def __init__(self, body: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.body, self.last = body, last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x))


LINEARS = lambda: Whole(Body(nn.Linear(16, 32), nn.Linear(32, 32)), nn.Linear(32, 4))  # noqa: E731
CONVOLUTIONS = lambda: Whole(  # noqa: E731
    Body(nn.Conv2d(3, 16, 3), nn.ConvTranspose2d(16, 16, 3)), nn.Conv2d(16, 4, 1)
)


@pytest.mark.parametrize(("build", "size"), [(LINEARS, (6, 16)), (CONVOLUTIONS, (2, 3, 8, 8))])
def test_layers_behind_a_module_are_tried_as_wide_as_they_are_now(
    build: Callable[[], Whole], size: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(size)
    fast = fxopt.optimize(model, PIPELINE, example_inputs=x, measure=False)
    width = fast.last.weight.shape[1]
    assert width < model.last.weight.shape[1]
    pruned = fxopt.optimize(model, PIPELINE.removesuffix(",pack"), example_inputs=x, measure=False)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), pruned(x))


@pytest.mark.parametrize("later", ["prune", "prune{method=structured}", "quantize", "qat", "autocast"])
def test_passes_that_need_layers_are_refused_in_a_later_call(later: str) -> None:
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval(), torch.randn(8, 16)
    fast = fxopt.optimize(model, "pack", example_inputs=x, measure=False)
    with pytest.raises(OrderError, match=r"'pack' in an earlier call.*fxopt\.restore\(model\), or list .*,pack in one"):
        fxopt.optimize(fast, later, example_inputs=x, measure=False)


def test_masked_layers_are_packed_once_their_masks_are_gone() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval(), torch.randn(8, 16)
    pruned = fxopt.optimize(model, "prune{method=nm},pack", example_inputs=x, measure=False)
    assert "its weight is masked" in str(fxopt.report(pruned))
    remove_masks(pruned)
    fast = fxopt.optimize(pruned, "pack", example_inputs=x, measure=False)
    assert any("packed_linear" in node.name for node in fxopt.graphs(fast)[""].nodes)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), pruned(x))
