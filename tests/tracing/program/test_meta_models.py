"""Models on the meta device: shapes decide, nothing is allocated, and what is loaded later computes what it should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.errors import InputError
from fxopt.runtime.graphs import capture_of
from fxopt.tracing.isolation import KnownNumbers


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x + torch.full((4,), 3.0)) for head in self.heads])


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(10, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.embedding(torch.arange(x.shape[1])) + torch.tensor([1.0, 2.0, 3.0, 4.0])


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1]
        mask = torch.full((size, size), float("-inf")).triu(1)
        x = self.linear(x)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


class ByDevice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "meta" or self.linear.weight.is_meta:
            return self.linear(x) * 3
        return self.linear(x)


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0))
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.linear(x) * self.table)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def assign(fast: nn.Module, state: dict[str, Tensor]) -> None:
    fast.load_state_dict(state, assign=True)


def fill(fast: nn.Module, state: dict[str, Tensor]) -> None:
    fast.to_empty(device="cpu")
    fast.load_state_dict(state)


@pytest.mark.parametrize("cls", [Heads, Positions, Masked, ByDevice, Buffers, Normed])
@pytest.mark.parametrize("load", [assign, fill])
@pytest.mark.parametrize("passes", [None, "inference", "fuse_ensembles{lowering=bmm}"])
@pytest.mark.filterwarnings("ignore:.*was changed after:UserWarning")
def test_what_is_loaded_later(cls: type[nn.Module], load: Callable[..., None], passes: str | None) -> None:
    torch.manual_seed(0)
    real, x = cls().eval(), torch.randn(2, 3, 4)
    with torch.device("meta"):
        model = cls().eval()
    if passes is None:
        program = fxopt.capture(model, (x,))
        assert not program.opaque
        fast: Any = program.model
    else:
        fast = fxopt.optimize(model, passes, example_inputs=(x,))
    assert all(tensor.is_meta for tensor in (*fast.parameters(), *fast.buffers()))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    load(fast, real.state_dict())
    for size in (2, 5, 2):
        x = torch.randn(size, 3, 4)
        torch.testing.assert_close(fast(x), real(x))
    if cls is not ByDevice:
        assert not capture_of(fast).misses
    state = fast.state_dict() if passes is None else fxopt.state_dict(fast)
    assert list(state) == list(real.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in real.state_dict().items())


def test_an_ensemble_is_fused_before_there_are_weights() -> None:
    with torch.device("meta"):
        model = Heads()
    fast = fxopt.optimize(model, "inference", example_inputs=(torch.randn(2, 3, 4),))
    statuses = {(d.pass_name, d.status) for d in fxopt.plan(fast).decisions}
    assert ("fuse_ensembles", "applied") in statuses
    reasons = [d.reason for d in fxopt.plan(fast).decisions if d.pass_name == "fold_constants"]
    assert reasons and all("the model is on the meta device" in reason for reason in reasons)


class Explicit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.ones(4, device="cpu")


def test_a_forward_that_wants_another_device_says_so() -> None:
    with torch.device("meta"):
        model = Explicit()
    with pytest.raises(fxopt.InputError, match="device cpu"):
        fxopt.capture(model, (torch.randn(2, 4),))


class Deciding(nn.Module):
    """Decide by the numbers of positions, and of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor, by_weight: bool = False) -> Tensor:
        positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
        packed = (positions.diff(dim=1) != 1).cumsum(-1)
        x = self.linear(x)
        if not (packed[:, -1] == 0).all():
            return x * 2
        if by_weight and self.linear.weight.sum() > 0:
            return x * 3
        return x * 5 if (lengths > 2).any() else x * 7


@pytest.mark.parametrize("longest", [2, 3])
def test_forwards_decide_by_numbers_that_depend_on_no_weight(longest: int):
    given = torch.randn(2, 3, 4), torch.tensor([1, longest])
    with torch.device("meta"):
        model = Deciding()
    program = fxopt.capture(model, given)
    assert not program.opaque
    plain = Deciding()
    assign(program.model, plain.state_dict())
    torch.testing.assert_close(program.model(*given), plain(*given))
    other = given[0], torch.tensor([1, 5 - longest])
    torch.testing.assert_close(program.model(*other), plain(*other))


def test_numbers_that_are_not_known_are_refused():
    with torch.device("meta"):
        model, x = Deciding(), torch.randn(2, 3, 4)
        lengths = torch.tensor([1, 3]).to("meta")
    with pytest.raises(InputError, match="give example inputs with data, on the CPU"):
        fxopt.capture(model, (x, lengths))
    with pytest.raises(InputError, match="use a smaller model of the same class"):
        fxopt.capture(model, (x, torch.tensor([1, 3]), True))


def test_numbers_that_were_overwritten_are_not_known():
    with torch.device("meta"), KnownNumbers():
        known = torch.zeros(3)
        assert not bool(known.any())
        view = known[1:]
        view.add_(torch.empty(2))
        for changed in (known, view):
            with pytest.raises(RuntimeError, match="does not have"):
                bool(changed.any())
        assert torch.arange(4)[2:].nonzero().shape == (2, 1)
        assert torch.arange(4).cpu().tolist() == [0, 1, 2, 3]
        with pytest.raises(RuntimeError, match="does not have"):
            bool(torch.rand(3).any())
