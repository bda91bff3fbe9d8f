"""Forwards that open contexts in standalone archives: held where a flat graph is the same without, else refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxopt

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.weight = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0))


def positions(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        angles = torch.arange(x.shape[0], dtype=x.dtype)[:, None] * self.table
        angles = torch.cat([angles.sin(), angles.cos()], 1)[:, :4]
    return self.linear(x) * angles


@torch.no_grad()
def _rotary(table: Tensor, count: int, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return (torch.arange(count)[:, None].float() * table).cos().to(x.dtype)


def rotary(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) * _rotary(self.table, x.shape[0], x)


def without_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = self.linear(x) @ self.weight.diag()
    return self.linear(y)


def switched(self: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        scale = self.table + x.shape[0]
        scale += 1
    return self.linear(x) * scale


HELD = [positions, rotary, without_autocast, switched]


def of_inputs(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        known = x.float()
    return self.linear(known)


def of_parameters(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = self.weight * 2
    return self.linear(x) * scale


def of_a_child(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        known = self.linear(torch.ones(x.shape[0], 4))
    return self.linear(x) + known


def written(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    with torch.no_grad():
        y[0] = 1.0
    return y * 2


def mixed(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return self.linear(x)


def recorded(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return self.linear(x) * 2


def inference(self: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = self.table * 2
    return self.linear(x) * scale


def checkpointed(self: Any, x: Tensor) -> Tensor:
    return checkpoint(self.linear, x, use_reentrant=False)


REFUSED = [
    (of_inputs, "where gradients might flow"),
    (of_parameters, "where gradients might flow"),
    (written, "where gradients might flow"),
    (of_a_child, "where gradients might flow"),
    (mixed, "its forward opens autocast"),
    (recorded, "its forward opens enable_grad"),
    (inference, "its forward opens inference_mode"),
    (checkpointed, "its forward opens checkpoint"),
]


def optimized(forward: Callable[..., Tensor]) -> nn.Module:
    model = type(forward.__name__, (Holder,), {"forward": forward})()
    fast = fxopt.optimize(model, [], example_inputs=(X,))
    assert "" in fxopt.graphs(fast)
    return fast


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    x = x.clone().requires_grad_()
    result = model(x)
    assert result.requires_grad
    result.square().sum().backward()
    return [x.grad, *(p.grad for _, p in sorted(model.named_parameters()))]


@pytest.mark.parametrize("forward", HELD)
def test_held(forward: Callable[..., Tensor], tmp_path: Path) -> None:
    fast, path = optimized(forward), tmp_path / "model.fxopt"
    fxopt.save(fast, path, kind="standalone")
    flat = fxopt.load(path)
    for size in (3, 5):
        x = torch.randn(size, 4)
        torch.testing.assert_close(flat(x), fast(x))
        for mine, other in zip(gradients(flat, x), gradients(fast, x), strict=True):
            assert (mine is None) == (other is None)
            if mine is not None and other is not None:
                torch.testing.assert_close(mine, other)
        with torch.no_grad():
            torch.testing.assert_close(flat(x), fast(x))


@pytest.mark.parametrize("forward", [rotary, without_autocast])
def test_autocast_around_what_forbids_it_is_noticed(forward: Callable[..., Tensor], tmp_path: Path) -> None:
    fast, path = optimized(forward), tmp_path / "model.fxopt"
    fxopt.save(fast, path, kind="standalone")
    flat = fxopt.load(path)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(fxopt.GuardError, match="runs without autocast"):
        flat(X)
    torch.testing.assert_close(flat(X), fast(X))


@pytest.mark.parametrize(("forward", "reason"), REFUSED)
def test_refused(forward: Callable[..., Tensor], reason: str, tmp_path: Path) -> None:
    with pytest.raises(fxopt.ArchiveError, match=reason):
        fxopt.save(optimized(forward), tmp_path / "model.fxopt", kind="standalone")
    assert not list(tmp_path.iterdir())
