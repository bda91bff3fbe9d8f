"""Layers with 2:4 weights use the sparse kernel in evaluation where it was faster; on a CPU a stand-in for it."""

from __future__ import annotations

import copy
import importlib
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.transforms.prune import masks, remove_masks, set_masks

KERNELS = importlib.import_module("fxopt.transforms.prune.masks.kernels")  # `masks` is a function of that room, too
X = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval()


def decided(model: nn.Module) -> list[tuple[str, str]]:
    return [(each.status, each.detail.partition("2:4, ")[2]) for each in fxopt.plan(model).decisions]


@pytest.fixture
def packed(monkeypatch: Any) -> list[Tensor]:
    """Let a CPU have the kernel: a dense one, of what was packed."""
    found: list[Tensor] = []

    def pack(weight: Tensor) -> Tensor:
        found.append(weight.detach().clone())
        return found[-1]

    for place in (inspect.getmodule(KERNELS.reason_against_sparse), KERNELS):
        monkeypatch.setattr(place, "reason_against_sparse", lambda *_: None)
        monkeypatch.setattr(place, "packed_weight", pack)
    return found


def test_a_cpu_computes_dense_and_says_so() -> None:
    fast = fxopt.optimize(network(), "prune{method=nm}", example_inputs=X)
    assert decided(fast) == [("applied", "computed dense: there is no sparse kernel for CPUs")] * 2


def test_what_is_faster_uses_the_kernel_and_what_is_not_does_not(packed: list[Tensor], monkeypatch: Any) -> None:
    monkeypatch.setattr(KERNELS, "_times_faster", lambda module, weight, x: 64 / module.out_features * 0.9)
    fast = fxopt.optimize(network(), "prune{method=nm}", example_inputs=X)
    slower, faster = "the sparse kernel takes 1.11 times as long", "1.80 times as fast"
    assert decided(fast) == [
        ("applied", f"computed dense: {slower}"),
        ("applied", f"computed by the sparse kernel in evaluation, {faster}"),
    ]
    packed.clear()
    with torch.no_grad():
        expected = nn.functional.linear(nn.functional.linear(X, fast[0].weight, fast[0].bias).relu(), fast[2].weight)
        assert torch.allclose(fast(X), expected + fast[2].bias, atol=1e-6)
        fast(X)
    assert len(packed) == 1 and torch.equal(packed[0], fast[2].weight)
    fast.train()(X).sum().backward()
    assert len(packed) == 1 and fast[2].weight.grad is not None


def test_the_kernel_has_the_weight_that_is_there(packed: list[Tensor], monkeypatch: Any) -> None:
    monkeypatch.setattr(KERNELS, "_times_faster", lambda *_: 2.0)
    fast = fxopt.optimize(network(), "prune{method=nm}", example_inputs=X)
    twin = copy.deepcopy(fast)
    with torch.no_grad():
        fast[2].weight.mul_(2)
        packed.clear()
        fast(X)
        assert torch.equal(packed[-1], fast[2].weight)
        packed.clear()
        set_masks(fast, {"2.weight": torch.ones_like(masks(fast)["2.weight"])})  # no 2:4 any more
        remove_masks(twin)
        fast(X), twin(X)
        assert not packed


@pytest.mark.parametrize("modes", [True, False])
def test_what_a_fused_optimizer_wrote_is_packed_anew(packed: list[Tensor], monkeypatch: Any, modes: bool) -> None:
    monkeypatch.setattr(KERNELS, "_times_faster", lambda *_: 2.0)
    fast = fxopt.optimize(network(), "prune{method=nm}", example_inputs=X)
    optimizer = torch.optim.Adam(fast.parameters(), lr=0.1, fused=True)
    with torch.no_grad():
        fast(X)
    loss = (fast.train() if modes else fast)(X).sum()
    if not modes:
        with torch.no_grad():
            fast(X)
    loss.backward()
    optimizer.step()  # raises no version
    if modes:
        fast.eval()
    packed.clear()
    with torch.no_grad():
        fast(X)
    assert [torch.equal(*each) for each in zip(packed, (fast[0].weight, fast[2].weight), strict=True)] == [True] * 2


def test_zeros_are_put_back_after_a_fused_optimizer_that_remembers() -> None:
    fast = fxopt.optimize(network(), "prune{method=nm}", example_inputs=X).train()
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.1, momentum=0.9, fused=True)
    for parameter in fast.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)  # as before it was pruned
    fast(X).sum().backward()
    optimizer.step()
    assert not fast[2].weight[masks(fast)["2.weight"] == 0].any()


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_gives_what_the_dense_layer_gives() -> None:
    model = nn.Sequential(nn.Linear(4096, 4096)).cuda().half().eval()
    x = torch.randn(512, 4096, device="cuda", dtype=torch.float16)
    fast = fxopt.optimize(model, "prune{method=nm}", example_inputs=x)
    ((_, said),) = decided(fast)
    assert said.startswith(
        ("computed by the sparse kernel in evaluation, ", "computed dense: the sparse kernel takes ")
    )
    with torch.no_grad():
        dense = nn.functional.linear(x, fast[0].weight, fast[0].bias)
        torch.testing.assert_close(fast(x), dense, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_masks_move_with_their_weights() -> None:
    fast = fxopt.optimize(network(), "prune{method=nm}", example_inputs=X).cuda()
    assert {each.device.type for each in masks(fast).values()} == {"cuda"}
    assert {each.device.type for each in masks(fast.cpu()).values()} == {"cpu"}


def test_masks_keep_their_values_where_weights_have_none() -> None:
    fast = fxopt.optimize(network(), "prune{method=nm}", example_inputs=X)
    kept = masks(fast)
    assert all(torch.equal(each, kept[name]) for name, each in masks(fast.to("meta")).items())
