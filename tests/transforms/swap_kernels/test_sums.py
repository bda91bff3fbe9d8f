"""swap_kernels: a norm with the addition before it is one operator, across modules, and gives the sum as well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.errors import UsageError
from fxopt.testing import assert_equivalent


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(8) + 0.5), 1e-6

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden.dtype)


class Block(nn.Module):
    """Two norms and a layer; the function says what is done with them."""

    def __init__(self, function: Callable[..., Any], norm: Callable[[], nn.Module] = RMSNorm) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(8, 8)
        self.first, self.second = norm(), norm()

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def decoder(self: Any, x: Tensor) -> Tensor:
    total = x + self.linear(self.first(x))
    return total + torch.tanh(self.second(total))


def swapped(model: nn.Module, x: Tensor) -> tuple[nn.Module, Counter[str]]:
    fast = fxopt.optimize(model, "swap_kernels", example_inputs=(x,), measure=False)
    applied = [each for each in fxopt.plan(fast).decisions if each.status == "applied"]
    return fast, Counter(each.site["data"]["kernel"] for each in applied)


def operators(fast: nn.Module) -> list[str]:
    return [str(n.target) for n in fxopt.graphs(fast)[""].nodes if "fxopt" in str(n.target)]


@pytest.mark.parametrize(
    ("norm", "name"),
    [(RMSNorm, "rms_norm"), (lambda: nn.LayerNorm(8), "layer_norm"), (lambda: nn.RMSNorm(8, 1e-6), "rms_norm")],
)
@pytest.mark.parametrize("train", [False, True])
def test_the_norm_of_a_sum_that_is_read_again(norm: Callable[[], nn.Module], name: str, train: bool):
    model, x = Block(decoder, norm).train(train), torch.randn(3, 8)
    fast, found = swapped(model, x)
    assert found == {name: 1, f"add_{name}": 1}
    assert operators(fast).count(f"fxopt.{name}.default") == (1 if norm is RMSNorm else 2)
    assert "second" not in [node.target for node in fxopt.graphs(fast)[""].nodes]
    assert_equivalent(model, fast, (x,))
    assert list(fast.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_narrow_dtypes_both_results_keep_theirs(dtype: torch.dtype):
    model, x = Block(decoder).to(dtype), torch.randn(3, 8, dtype=dtype)
    fast, found = swapped(model, x)
    assert found["add_rms_norm"] == 1
    assert fast(x).dtype == dtype
    tolerance = 0.05 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(fast(x), model(x), atol=tolerance, rtol=tolerance)


def between(self: Any, x: Tensor) -> Tensor:
    total = x + self.linear(x)
    other = torch.tanh(total)
    return self.first(total) * other + total


def post_norm(self: Any, x: Tensor) -> Tensor:
    return self.first(torch.add(self.linear(x), x))


def in_one_graph(self: Any, x: Tensor) -> Tensor:
    total = self.linear(x) + x
    return self.first.weight * (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)) + total


def twice(self: Any, x: Tensor) -> Tensor:
    total = x + self.linear(x)
    return self.first(total) + self.first(total + total)


@pytest.mark.parametrize(("function", "count"), [(between, 1), (post_norm, 1), (in_one_graph, 1), (twice, 2)])
def test_wherever_the_sum_is_read(function: Callable[..., Any], count: int):
    model, x = Block(function), torch.randn(3, 8)
    fast, found = swapped(model, x)
    assert found == {"add_rms_norm": count}
    assert_equivalent(model, fast, (x,))


def scaled(self: Any, x: Tensor) -> Tensor:
    return self.first(torch.add(x, self.linear(x), alpha=2))


def a_row(self: Any, x: Tensor) -> Tensor:
    return self.first(x + self.linear.bias)


def a_number(self: Any, x: Tensor) -> Tensor:
    return self.first(x + 1)


@pytest.mark.parametrize("function", [scaled, a_row, a_number])
def test_other_sums_are_computed_before(function: Callable[..., Any]):
    model, x = Block(function), torch.randn(3, 8)
    fast, found = swapped(model, x)
    assert found == {"rms_norm": 1}
    assert_equivalent(model, fast, (x,))


def test_a_norm_with_a_hook_stays_a_module():
    model, x = Block(decoder), torch.randn(3, 8)
    model.second.register_forward_hook(lambda *_: None)
    assert swapped(model, x)[1]["add_rms_norm"] == 0


def test_a_norm_that_is_also_called_elsewhere_is_swapped_there_too():
    model, x = Block(lambda self, x: self.first(self.first(x) + x)), torch.randn(3, 8)
    fast, found = swapped(model, x)
    assert found == {"rms_norm": 1, "add_rms_norm": 1}
    assert_equivalent(model, fast, (x,))


def test_weights_are_read_where_they_are_and_settings_kept_until_restored():
    model, x = Block(decoder), torch.randn(3, 8)
    fast = swapped(model, x)[0]
    with torch.no_grad():
        fast.second.weight.mul_(2)
        model.second.weight.mul_(2)
    assert_equivalent(model, fast, (x,))
    with pytest.raises(fxopt.FxoptError):
        fast.second.eps = 1.0
    back = fxopt.restore(fast)
    back.second.eps = 1.0
    assert type(back) is Block


def test_only_norms_are_swapped_where_only_they_are_asked_for():
    model, x = Block(decoder), torch.randn(3, 8)
    fast = fxopt.optimize(model, "swap_kernels{kernels=[rms_norm]}", example_inputs=(x,), measure=False)
    assert [each.site["data"]["kernel"] for each in fxopt.plan(fast).decisions] == ["rms_norm"] * 2


@pytest.mark.parametrize("norm", [RMSNorm, lambda: nn.LayerNorm(8)])
def test_other_shapes_and_dtypes_later_are_added_as_before(norm: Callable[[], nn.Module]):
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm()

        def forward(self, x: Tensor, residual: Tensor) -> Tensor:
            return self.norm(x + residual)

    model, x = Added(), torch.randn(4, 6, 8)
    fast = fxopt.optimize(model, "swap_kernels", example_inputs=(x, torch.randn(4, 6, 8)), measure=False)
    assert any("fxopt.add" in name or "_norm" in name for name in operators(fast))
    for other in (torch.randn(1, 6, 8), torch.randn(8), torch.randn(4, 6, 8).bfloat16(), torch.randn(4, 1, 1).half()):
        assert_equivalent(model, fast, (x, other))
        assert_equivalent(model, fast, (other, x))
    with pytest.raises(UsageError, match=r"residual has shape \(5,\), x \(4, 6, 8\); they must broadcast"):
        fast(x, torch.randn(5))
