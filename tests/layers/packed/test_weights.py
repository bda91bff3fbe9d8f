"""When packed weights are computed with, and how weights that cannot be packed are told."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxopt.compat import is_plainly_eager, runs_kernels
from fxopt.compat.packed import why_no_packing
from fxopt.layers.packed import PackedLinear, why_not_packed
from fxopt.layers.packed.weights import can_be_packed

needs_packing = pytest.mark.skipif(bool(why_no_packing(torch.float32)), reason=why_no_packing(torch.float32))

CONTEXTS: dict[str, tuple[Callable[[], AbstractContextManager], bool, bool]] = {
    "none": (nullcontext, True, True),
    "default device": (lambda: torch.device("cpu"), True, True),
    "function mode": (TorchFunctionMode, False, False),
    "dispatch mode": (TorchDispatchMode, False, False),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), True, False),
    "tangents": (forward_ad.dual_level, False, False),
}


@pytest.mark.parametrize(("context", "eager", "runs"), CONTEXTS.values(), ids=CONTEXTS)
def test_where_operations_run_as_they_are_called(context: Callable, eager: bool, runs: bool) -> None:
    with context():
        assert (is_plainly_eager(), runs_kernels()) == (eager, runs)
    assert is_plainly_eager() and runs_kernels()


def test_transforms_and_traces_look_on() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.extend([is_plainly_eager(), runs_kernels()])
        return x * 2

    torch.vmap(look)(torch.ones(2))
    torch.func.grad(lambda x: look(x).sum())(torch.ones(2))
    assert not any(seen) and len(seen) == 4


@needs_packing
def test_packed_weights_are_used_inside_a_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, linear, x = PackedLinear(), nn.Linear(8, 4), torch.randn(3, 8)
    monkeypatch.setattr(PackedLinear, "computed", lambda *_: pytest.fail("computed as torch does"))
    with torch.device("cpu"), torch.no_grad():
        torch.testing.assert_close(layer(x, linear.weight, linear.bias), linear(x))


REASONS = {
    "its weight is no plain tensor, but one of layout torch.sparse_coo": lambda: torch.ones(2, 2).to_sparse(),
    "its weight is of float64; only float32 is packed": lambda: torch.ones(2, 2, dtype=torch.float64),
    "its weight is empty": lambda: torch.ones(0, 2),
    "": lambda: torch.ones(2, 2, device="meta"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_weights_that_are_not_packed(reason: str) -> None:
    weight = REASONS[reason]()
    assert why_not_packed(weight) == reason
    assert not can_be_packed(weight)


def test_weights_of_inference_mode_are_not_packed() -> None:
    with torch.inference_mode():
        weight = torch.ones(2, 2)
    assert why_not_packed(weight).startswith("its weight was made in inference_mode")
    assert can_be_packed(torch.ones(2, 2))
