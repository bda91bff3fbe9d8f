"""Folding and unfolding as arithmetic: the same function both ways, whatever the layout, and exact while untouched."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fxopt.errors import StateError
from fxopt.passes.folding import Channels, Originals, fold, touched, unfold
from fxopt.passes.state_map import Fold, Rename, StateMap


@st.composite
def folds(draw: st.DrawFn) -> tuple[Fold, list[Tensor]]:
    """Draw a fold and the tensors that go into it."""
    transposed, groups = draw(st.booleans()), draw(st.sampled_from([1, 2, 3]))
    rank, seed = draw(st.integers(int(transposed), 2)), draw(st.integers(0, 99))
    step = Fold(
        "a.conv", "a.bn", draw(st.sampled_from([0.0, 1e-5, 0.1])), draw(st.booleans()), draw(st.booleans()),
        draw(st.booleans()), transposed, groups if transposed else 1,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weight = noise(2 * groups, 4, *[3] * rank) if transposed else noise(4 * groups, 2, *[3] * rank)
    others = [noise(4 * groups) for _ in step.sources[1:-1]]
    variance = torch.rand(4 * groups, generator=generator).to(dtype) + 0.1
    return step, [weight, *others, variance]


def parts(step: Fold, tensors: list[Tensor]) -> Originals:
    named = dict(zip(step.sources, tensors, strict=True))
    names = ("a.conv.weight", "a.conv.bias", "a.bn.weight", "a.bn.bias", "a.bn.running_mean", "a.bn.running_var")
    return Originals(*(named.get(name) for name in names))


@given(folds())
def test_the_way_back_is_exact_and_says_nothing(case: tuple[Fold, list[Tensor]]) -> None:
    step, tensors = case
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = step.backward(step.forward(tensors))
    assert all(torch.equal(one, other) for one, other in zip(tensors, back, strict=True))
    assert len(step.targets) == len(step.sources) + 2 == len(set(step.targets) | set(step.sources)) - len(step.sources)


@given(folds())
def test_it_folds_to_what_the_norm_computes(case: tuple[Fold, list[Tensor]]) -> None:
    step, tensors = case
    originals = parts(step, [tensor.double() for tensor in tensors])
    weight, bias, *_ = step.forward([tensor.double() for tensor in tensors])
    rank = weight.ndim - 2
    x = torch.randn(2, weight.shape[0] if step.transposed else weight.shape[1], *[4] * rank).double()

    def layer(weight: Tensor, bias: Tensor | None) -> Tensor:
        if rank == 0:
            return nn.functional.linear(x, weight, bias)
        name = f"conv{'_transpose' if step.transposed else ''}{rank}d"
        return getattr(nn.functional, name)(x, weight, bias, groups=step.groups)

    expected = nn.functional.batch_norm(
        layer(originals.weight, originals.bias), originals.mean, originals.variance, originals.gamma, originals.beta,
        eps=step.eps,
    )  # fmt: skip
    torch.testing.assert_close(layer(weight, bias), expected)


@given(folds(), st.integers(0, 3), st.booleans())
def test_what_was_changed_is_taken_back_as_the_same_function(
    case: tuple[Fold, list[Tensor]], channel: int, in_weight: bool
) -> None:
    step, tensors = case
    originals, channels = parts(step, tensors), Channels(step.transposed, step.groups)
    now = fold(originals, step.eps, channels)
    rows = now.weight[:, channel] if step.transposed else now.weight[channel]
    if in_weight:
        rows.mul_(1.5)
    else:
        now.bias[channel] += 3.0
    which = touched(now, originals, step.eps, channels)
    assert which.nonzero().flatten().tolist() == ([channel] if not step.transposed or not in_weight else
                                                  [channel + 4 * group for group in range(step.groups)])  # fmt: skip
    again = fold(unfold(now, originals, step.eps, channels, which), step.eps, channels)
    eps = torch.finfo(now.weight.dtype).eps
    torch.testing.assert_close(again.weight, now.weight, rtol=8 * eps, atol=0.0)
    scale = float(now.bias.abs().max()) + 10
    torch.testing.assert_close(again.bias, now.bias, rtol=0.0, atol=64 * eps * scale)


@given(folds())
def test_json_round_trip_and_renaming(case: tuple[Fold, list[Tensor]]) -> None:
    step, _ = case
    whole = StateMap((step, Rename("a.conv.folded.weight", "w")))
    assert StateMap.from_json(json.loads(json.dumps(whole.to_json()))) == whole
    below = whole.below("home")
    assert below.steps[0].sources == tuple(f"home.{name}" for name in step.sources)
    assert set(below.computed) == {f"home.{n}" for n in step.targets if n != "a.conv.folded.weight"} | {"home.w"}


@pytest.mark.parametrize("change", [{"eps": "0.1"}, {"biased": 1}, {"groups": 1.0}, {"layer": 3}])
def test_json_of_other_types_is_refused(change: dict[str, object]) -> None:
    data = {**Fold("a", "b", 0.1, True, True, True).to_json(), **change}
    with pytest.raises(StateError, match=f"field '{next(iter(change))}' of a fold step"):
        StateMap.from_json({"schema_version": 1, "steps": [data], "aliases": {}, "names": []})


def test_unequal_channels_are_refused() -> None:
    step = Fold("a", "b", 0.1, False, False, False)
    with pytest.raises(StateError, match=r"'b' has \[3\] channels and 'a' 4"):
        step.forward([torch.ones(4, 2), torch.ones(3), torch.ones(3)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_both_is_no_change_and_rounding_one_is(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    step = Fold("a", "b", 1e-5, False, False, False)
    tensors = [torch.randn(8, 5), torch.randn(8), torch.rand(8)]
    new = step.forward(tensors)
    rounded = [tensor.to(dtype).float() for tensor in new]
    assert all(a is b for a, b in zip(step.backward(rounded), rounded[2:], strict=True))
    with pytest.warns(UserWarning, match=r"'a\.folded' was changed"):
        step.backward([rounded[0] * 1.01, rounded[1], *new[2:]])
