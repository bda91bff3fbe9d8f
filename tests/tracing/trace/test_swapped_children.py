"""Children that are swapped after capture or optimization: the new one runs, or the swap is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.errors import FusedMemberError, GuardWarning


class LowRank(nn.Module):
    """Add a low-rank product to a linear."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, 2, bias=False)
        self.up = nn.Linear(2, linear.out_features, bias=False)
        nn.init.constant_(self.down.weight, 0.2)
        nn.init.constant_(self.up.weight, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))
        self.frozen, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.frozen(x)
        return self.out(self.query(x) * self.key(x) + self.value(x))


class Repeated(nn.Module):
    """Call one layer under three names, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(4, 4)
        self.layers = nn.ModuleList([layer] * 3)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.stack([head(x) for head in self.heads])


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4)


def captured(model: nn.Module) -> nn.Module:
    return fxopt.capture(model, (inputs(),)).model


def fused(model: nn.Module) -> nn.Module:
    passes = "fuse_ensembles{lowering=bmm}"
    return fxopt.optimize(model, passes, example_inputs=(inputs(),), verify=False, measure=False)


def adapt(name: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        setattr(model, name, LowRank(getattr(model, name)))

    return change


@pytest.mark.filterwarnings("ignore::fxopt.errors.GuardWarning")
@pytest.mark.parametrize("name", ["query", "frozen", "out"])
def test_a_captured_model_runs_an_adapter(name: str):
    model = Layer()
    fast = captured(model)
    before = fast(inputs())
    for each in (model, fast):
        adapt(name)(each)
    torch.testing.assert_close(fast(inputs()), model(inputs()))
    assert not torch.allclose(fast(inputs()), before)


@pytest.mark.filterwarnings("ignore::fxopt.errors.GuardWarning")
@pytest.mark.parametrize("name", ["frozen", "out"])
def test_a_fused_model_runs_an_adapter_where_nothing_was_fused(name: str):
    model = Layer()
    fast = fused(model)
    for each in (model, fast):
        adapt(name)(each)
    torch.testing.assert_close(fast(inputs()), model(inputs()))


def test_a_fused_member_takes_no_adapter():
    model = Layer()
    fast = fused(model)
    with pytest.raises(FusedMemberError, match=r"'query' cannot be replaced.*fxopt\.restore\(model\)"):
        adapt("query")(fast)
    torch.testing.assert_close(fast(inputs()), model(inputs()))
    restored = fxopt.restore(fast)
    for each in (model, restored):
        adapt("query")(each)
    torch.testing.assert_close(fused(restored)(inputs()), model(inputs()))


def test_adapters_of_peft_are_refused_where_members_are_fused():
    peft = pytest.importorskip("peft")
    fast = fused(Layer())
    before = fast(inputs())
    with pytest.raises(FusedMemberError, match="'query' cannot be replaced"):
        peft.get_peft_model(fast, peft.LoraConfig(r=2, target_modules=["query", "value"]))
    assert torch.equal(fast(inputs()), before)
    adapted = peft.get_peft_model(fast, peft.LoraConfig(r=2, target_modules=["out"], init_lora_weights=False))
    assert not torch.allclose(adapted(inputs()), before)


@pytest.mark.parametrize("make", [captured, fused])
def test_one_of_several_names_is_replaced(make: Callable[[nn.Module], nn.Module], recwarn: pytest.WarningsRecorder):
    model = Repeated()
    fast = make(model)
    torch.testing.assert_close(fast(inputs()), model(inputs()))
    assert not [warning for warning in recwarn if warning.category is GuardWarning]
    layer = nn.Linear(4, 4)
    for each in (model, fast):
        each.get_submodule("layers")[1] = copy.deepcopy(layer)  # pyright: ignore[reportIndexIssue]
    with pytest.warns(GuardWarning, match=r"layers\[1\] is self.layers\[0\]"):
        torch.testing.assert_close(fast(inputs()), model(inputs()))
