"""What is left of folded modules: originals that read as before, and write through wherever memory is shared."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxopt.errors import FusedMemberError, GuardError, ModeError
from fxopt.layers.folded import expect_dimensions, fold_modules, is_folded
from fxopt.layers.original import OriginalTensor
from fxopt.passes.state_steps import Fold


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.bn.running_mean.normal_()
        self.bn.running_var.uniform_(0.5, 2.0)
        self.eval()

    def fold(self) -> Callable[[], None]:
        return fold_modules(self.conv, self.bn, Fold("conv", "bn", self.bn.eps, True, True, True))

    def original(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))

    def agree(self) -> bool:
        """Say whether the folded layer computes what the two originals do."""
        x = torch.randn(2, 3, 5, 5)
        return torch.allclose(self.conv.folded(x), self.original(x), rtol=1e-4, atol=1e-5)


@pytest.fixture
def pair() -> Pair:
    pair = Pair()
    pair.fold()
    return pair


def test_undoing_puts_everything_back() -> None:
    pair, names = Pair(), list(Pair().state_dict())
    weight, x = pair.conv.weight, torch.randn(2, 3, 5, 5)
    before = pair.original(x)
    undo = pair.fold()
    assert is_folded(pair.conv) and is_folded(pair.bn) and "conv.weight" not in pair.state_dict()
    undo()
    assert not is_folded(pair.conv) and type(pair.conv) is nn.Conv2d and type(pair.bn) is nn.BatchNorm2d
    assert list(pair.state_dict()) == names and pair.conv.weight is weight
    assert torch.equal(pair.original(x), before)


def test_originals_read_as_before(pair: Pair) -> None:
    fresh = Pair()
    assert torch.equal(pair.conv.weight, fresh.conv.weight) and torch.equal(pair.bn.running_var, fresh.bn.running_var)
    assert isinstance(pair.conv, nn.Conv2d) and isinstance(pair.bn, nn.BatchNorm2d)
    assert pair.conv.weight.dtype is torch.float32 and pair.conv.weight.shape == (4, 3, 3, 3)
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(pair.original(x), fresh.original(x))
    torch.testing.assert_close(pair.conv.folded(x), fresh.original(x))
    assert type(pair.original(x)) is Tensor


def test_what_shares_no_memory_is_a_plain_tensor(pair: Pair) -> None:
    weight = pair.conv.weight
    for shared in (weight, weight[0], weight.data, weight.detach(), weight.view(-1), *weight.unbind(0)):
        assert isinstance(shared, OriginalTensor)
    for plain in (weight.clone(), weight + 1, weight.sum(), weight.double(), torch.stack([weight, weight])):
        assert type(plain) is Tensor


WRITES: list[Callable[[Pair], object]] = [
    lambda p: p.conv.weight.zero_(),
    lambda p: p.conv.weight.data[0].normal_(),
    lambda p: p.conv.weight.view(-1)[:3].mul_(7),
    lambda p: p.conv.weight.unbind(0)[1].fill_(2.0),
    lambda p: nn.init.kaiming_uniform_(p.conv.weight),
    lambda p: torch.mul(p.conv.bias, 2.0, out=p.conv.bias),
    lambda p: torch._foreach_mul_([p.conv.weight, p.conv.bias], 3.0),
    lambda p: setattr(p.conv.bias, "data", torch.full((4,), 7.0)),
    lambda p: setattr(p.bn, "running_mean", torch.full((4,), 7.0)),
    lambda p: p.bn.reset_running_stats(),
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_writes_fold_anew(pair: Pair, write: Callable[[Pair], object], mode: Callable[[], torch.no_grad]) -> None:
    before = [tensor.clone() for tensor in pair.conv.folded.parameters()]
    with mode():
        write(pair)
    assert not all(map(torch.equal, before, pair.conv.folded.parameters()))
    assert pair.agree()


def test_views_kept_for_later_still_write_through(pair: Pair) -> None:
    row = pair.conv.weight[2]
    assert pair.agree()
    row.add_(1.0)
    assert pair.agree() and bool((pair.conv.weight[2] == row).all())


def test_arrays_are_read_only(pair: Pair) -> None:
    array = pair.conv.weight.numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_writes_into_the_folded_tensors_show_in_the_originals(pair: Pair) -> None:
    with torch.no_grad():
        pair.conv.folded.weight[1].mul_(2.0)
        pair.conv.folded.bias[2] += 1.0
    with pytest.warns(UserWarning, match=r"'conv\.folded' was changed"):
        assert pair.agree()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_copies_stand_on_their_own(pair: Pair, copied: Callable[[Pair], Pair]) -> None:
    twin = copied(pair)
    before = pair.conv.folded.weight.clone()
    twin.bn.weight.fill_(3.0)
    assert twin.agree() and pair.agree()
    assert torch.equal(pair.conv.folded.weight, before)
    assert not torch.equal(twin.conv.folded.weight, before)


def test_a_new_module_of_the_same_class_is_no_part_of_it(pair: Pair) -> None:
    new = type(pair.conv)(3, 4, 3)
    assert type(new) is nn.Conv2d and isinstance(new.weight, nn.Parameter)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: setattr(p.conv, "weight", None),
        lambda p: setattr(p.conv, "weight", torch.ones(3)),
        lambda p: delattr(p.conv, "weight"),
        lambda p: setattr(p.conv, "stride", (2, 2)),
        lambda p: setattr(p.bn, "forward", torch.relu),
        lambda p: p.conv.register_parameter("weight", nn.Parameter(torch.ones(4, 3, 3, 3))),
        lambda p: p.bn.register_buffer("running_mean", torch.ones(4)),
        lambda p: p.conv.add_module("folded", nn.Identity()),
        lambda p: p.bn.register_forward_hook(print),
        lambda p: p.conv.register_forward_pre_hook(print),
        lambda p: nn.utils.parametrizations.weight_norm(p.conv),
    ],
)
def test_what_would_not_reach_the_computation_fails(pair: Pair, change: Callable[[Pair], object]) -> None:
    with pytest.raises(FusedMemberError, match=r"this Conv2d|this BatchNorm2d"):
        change(pair)
    assert pair.agree()


@pytest.mark.parametrize("trains", [True, False])
def test_the_folded_tensors_want_gradients_where_the_layer_did(trains: bool) -> None:
    pair, x = Pair(), torch.randn(2, 3, 5, 5)
    pair.conv.requires_grad_(trains)
    pair.fold()
    folded = pair.conv.folded
    assert [tensor.requires_grad for tensor in (folded.weight, folded.bias, folded(x))] == [trains] * 3


def test_the_norm_cannot_be_trained(pair: Pair) -> None:
    pair.conv.train().eval()
    with pytest.raises(ModeError, match="restore"):
        pair.bn.train()
    with pytest.raises(ModeError, match="restore"):
        pair.bn.training = True
    assert not pair.bn.eval().training


def test_expect_dimensions() -> None:
    expect_dimensions(torch.ones(2, 3), 2)
    with pytest.raises(GuardError, match="2 dimensions, and this one has 3"):
        expect_dimensions(torch.ones(2, 3, 4), 2)
