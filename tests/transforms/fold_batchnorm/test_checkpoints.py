"""Checkpoints of folded models, both ways."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from norms import IMAGE, block, folded, same_state, shaken, trained
from torch import nn

import fxopt


def test_old_checkpoints_load_and_new_ones_are_the_old() -> None:
    model, other = block(), shaken(block(), seed=1)
    fast = folded(model)
    x = torch.randn(IMAGE)
    assert fast.load_state_dict(other.state_dict()).missing_keys == []
    torch.testing.assert_close(fast(x), other(x))
    assert same_state(other, fast)
    fxopt.load_state_dict(fast, model.state_dict(), assign=True)
    torch.testing.assert_close(fast(x), model(x))
    fast.load_state_dict(folded(other).state_dict())
    torch.testing.assert_close(fast(x), other(x))
    assert same_state(other, fast)


def test_partial_checkpoints_keep_the_rest() -> None:
    model = block()
    fast = folded(model)
    mean = {"norm.running_mean": torch.full((6,), 3.0)}
    missing = model.load_state_dict(mean, strict=False).missing_keys
    assert sorted(fast.load_state_dict(mean, strict=False).missing_keys) == sorted(missing)
    torch.testing.assert_close(fast(x := torch.randn(IMAGE)), model(x))
    assert same_state(model, fast)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*layer\.weight"):
        fast.load_state_dict(mean)
    with pytest.raises(RuntimeError, match=r"size mismatch for layer\.weight"):
        fast.load_state_dict({**model.state_dict(), "layer.weight": torch.ones(6, 3, 5, 5)})


def test_restore_gives_the_old_structure_and_weights_bit_by_bit() -> None:
    model = block()
    restored = fxopt.restore(folded(model))
    assert type(restored.layer) is nn.Conv2d and "folded" not in str(restored)
    x = torch.randn(IMAGE)
    assert torch.equal(restored(x), model(x))
    assert all(
        torch.equal(a, b) for a, b in zip(restored.state_dict().values(), model.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("dtypes", [(torch.float16,), (torch.bfloat16, torch.float32), (torch.float64,)])
def test_casting_is_no_change(dtypes: tuple[torch.dtype, ...]) -> None:
    model = block()
    fast = folded(model)
    for dtype in dtypes:
        model, fast = model.to(dtype), fast.to(dtype)
    assert same_state(model, fast)


def test_optimizers_follow() -> None:
    model = block()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer, torch.randn(IMAGE))
    fast = folded(model)
    moved = fxopt.translate_optimizer(optimizer, fast)
    assert [id(p) for p in moved.param_groups[0]["params"]] == [id(p) for p in fast.parameters()]


def writes() -> list[Callable[[nn.Module], object]]:
    return [
        lambda m: m.layer.weight.fill_(0.5),
        lambda m: m.layer.weight[1].zero_(),
        lambda m: m.layer.weight.__setitem__(0, 1.0),
        lambda m: setattr(m.layer, "weight", nn.Parameter(torch.full((6, 3, 3, 3), 0.25))),
        lambda m: setattr(m.layer.weight, "data", torch.full((6, 3, 3, 3), 0.25)),
        lambda m: nn.init.constant_(m.layer.bias, 2.0),
        lambda m: m.norm.running_mean.add_(1.0),
        lambda m: m.norm.reset_running_stats(),
        lambda m: m.norm.weight.copy_(torch.arange(6.0)),
        lambda m: torch.mul(m.norm.bias.detach(), 2.0, out=m.norm.bias.detach()),
    ]


@pytest.mark.parametrize("write", writes())
def test_writing_into_an_original_folds_anew(write: Callable[[nn.Module], object]) -> None:
    model = block()
    fast = folded(model)
    with torch.no_grad():
        write(model)
        write(fast)
    x = torch.randn(IMAGE)
    assert not torch.equal(folded(block())(x), fast(x))
    torch.testing.assert_close(fast(x), model(x))
    assert same_state(model, fast)


def test_what_torch_does_not_count_can_be_told() -> None:
    model = block()
    fast, x = folded(model), torch.randn(IMAGE)
    fast(x)
    for each in (model, fast):
        each.layer.weight.data.mul_(2.0)
    torch.autograd.graph.increment_version(fast.layer.weight)
    torch.testing.assert_close(fast(x), model(x))


def test_other_devices_types_and_tensors() -> None:
    model, x = block(), torch.randn(IMAGE)
    fast = folded(model)
    for change in (
        lambda m: m.half(),
        lambda m: m.float(),
        lambda m: m.layer.double() and m.norm.double(),
        lambda m: m.float(),
        lambda m: m.load_state_dict({name: tensor + 1 for name, tensor in m.state_dict().items()}, assign=True),
    ):
        for each in (model, fast):
            change(each)
        given = x.to(model.layer.weight.dtype)
        slack = 1e-2 if given.itemsize == 2 else 1e-5
        torch.testing.assert_close(fast(given), model(given), rtol=slack, atol=slack)
    given = {name: torch.rand_like(parameter) for name, parameter in model.named_parameters()}
    expected = torch.func.functional_call(model, given, (x,))
    torch.testing.assert_close(torch.func.functional_call(fast, given, (x,)), expected)
    torch.testing.assert_close(fast(x), model(x))


def test_copies_and_pickles_are_independent() -> None:
    model = block()
    fast = folded(model)
    x = torch.randn(IMAGE)
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        twin.norm.running_mean.add_(1.0)
        assert not torch.allclose(twin(x), fast(x))
        torch.testing.assert_close(fast(x), model(x))
        torch.testing.assert_close(twin(x), fxopt.restore(twin)(x))


def test_archives(tmp_path: Path) -> None:
    model = block()
    fast = folded(model)
    fxopt.save(fast, tmp_path / "model.fxopt")
    again = fxopt.load(tmp_path / "model.fxopt", model=block(bias=True))
    assert torch.equal(again(x := torch.randn(IMAGE)), fast(x))
