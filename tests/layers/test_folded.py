"""Folding as arithmetic: the same function as layer and norm one after the other, whatever the layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fxopt
from fxopt.layers.folded import Fold, Folds


@st.composite
def folds(draw: st.DrawFn) -> tuple[Fold, dict[str, Tensor]]:
    """Draw a fold and the tensors that go into it, in the order of the call."""
    transposed, groups = draw(st.booleans()), draw(st.sampled_from([1, 2, 3]))
    rank, seed = draw(st.integers(int(transposed), 2)), draw(st.integers(0, 99))
    flags = (draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))
    fold = Fold(draw(st.sampled_from([1e-5, 0.1])), *flags, transposed, groups if transposed else 1)
    generator = torch.Generator().manual_seed(seed)
    shape = (2 * groups, 4, *[3] * rank) if transposed else (4 * groups, 2, *[3] * rank)
    names = [f"layer {name}" for name in fold.layer_tensors] + [f"norm {name}" for name in fold.norm_tensors]
    tensors = {name: torch.randn(4 * groups, generator=generator) for name in names}
    tensors["layer weight"] = torch.randn(shape, generator=generator)
    tensors["norm running_var"] = torch.rand(4 * groups, generator=generator) + 0.1
    tensors["norm num_batches_tracked"] = torch.tensor(3)
    return fold, tensors


def run(fold: Fold, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rank = weight.ndim - 2
    if rank == 0:
        return F.linear(x, weight, bias)
    groups = {"groups": fold.groups} if fold.transposed else {}
    return getattr(F, f"conv{'_transpose' if fold.transposed else ''}{rank}d")(x, weight, bias, **groups)


@given(folds())
def test_it_folds_to_what_the_norm_computes(case: tuple[Fold, dict[str, Tensor]]) -> None:
    fold, tensors = case
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    weight = wide["layer weight"]
    x = torch.randn(2, weight.shape[0 if fold.transposed else 1], *[5] * (weight.ndim - 2), dtype=torch.float64)
    expected = F.batch_norm(
        run(fold, x, weight, wide.get("layer bias")), wide["norm running_mean"], wide["norm running_var"],
        wide.get("norm weight"), wide.get("norm bias"), eps=fold.eps,
    )  # fmt: skip
    torch.testing.assert_close(run(fold, x, *fold(*wide.values())), expected)


@given(folds(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_it_rounds_once(case: tuple[Fold, dict[str, Tensor]], dtype: torch.dtype) -> None:
    fold, tensors = case
    narrow = [tensor.to(dtype) for tensor in tensors.values()]
    exact = fold(*(tensor.double() for tensor in narrow))
    for found, expected in zip(fold(*narrow), exact, strict=True):
        assert torch.equal(found, expected.to(dtype))


@given(folds())
def test_members_at_once(case: tuple[Fold, dict[str, Tensor]]) -> None:
    fold, tensors = case
    several = [torch.stack([tensor, tensor * 2]) for tensor in tensors.values()]
    weights, biases = torch.vmap(fold)(*several)
    for member in range(2):
        weight, bias = fold(*(tensor[member] for tensor in several))
        torch.testing.assert_close(weights[member], weight)
        torch.testing.assert_close(biases[member], bias)


@st.composite
def folds_behind_norms(draw: st.DrawFn) -> tuple[Fold, list[Tensor]]:
    """Draw a fold of a norm into the layer behind it, and the tensors that go into it, in the order of the call."""
    groups, rank = draw(st.sampled_from([1, 2, 3])), draw(st.integers(0, 2))
    groups = groups if rank else 1
    flags = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    fold = Fold(0.1, *flags, groups=groups, before=True, counted=draw(st.booleans()))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensors = {"layer weight": torch.randn(4 * groups, 2, *[3] * rank, generator=generator, dtype=torch.float64)}
    names = [f"layer {name}" for name in fold.layer_tensors[1:]] + [f"norm {name}" for name in fold.norm_tensors]
    for name in names:
        width = 4 if name.startswith("layer") else 2
        tensors[name] = torch.rand(width * groups, generator=generator, dtype=torch.float64) + 0.1
    return fold, list(tensors.values())


def normed(fold: Fold, x: Tensor, tensors: list[Tensor]) -> Tensor:
    own = dict(zip(fold.norm_tensors, tensors, strict=True))
    return F.batch_norm(
        x, own["running_mean"], own["running_var"], own.get("weight"), own.get("bias"), False, 0.0, fold.eps
    )


def layer(fold: Fold, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rank = weight.ndim - 2
    return getattr(F, f"conv{rank}d")(x, weight, bias, groups=fold.groups) if rank else F.linear(x, weight, bias)


@given(folds_behind_norms())
def test_a_layer_behind_a_norm_takes_it(case: tuple[Fold, list[Tensor]]) -> None:
    fold, tensors = case
    count = len(fold.layer_tensors)
    x = torch.randn(2, tensors[0].shape[1] * fold.groups, *[5] * (tensors[0].ndim - 2), dtype=torch.float64)
    expected = layer(fold, normed(fold, x, tensors[count:]), *tensors[:count])
    torch.testing.assert_close(layer(fold, x, *fold(*tensors)), expected)


@given(folds_behind_norms(), st.booleans())
def test_a_layer_between_two_norms_takes_both(case: tuple[Fold, list[Tensor]], affine: bool) -> None:
    fold, tensors = case
    count, width = len(fold.layer_tensors), tensors[0].shape[0]
    behind = Fold(0.2, biased=True, scaled=affine, shifted=affine)
    second = [torch.rand(width, dtype=torch.float64) + 0.1 for _ in behind.norm_tensors]
    x = torch.randn(2, tensors[0].shape[1] * fold.groups, *[5] * (tensors[0].ndim - 2), dtype=torch.float64)
    between = layer(fold, normed(fold, x, tensors[count:]), *tensors[:count])
    found = Folds(fold, behind)(*tensors, *second)
    torch.testing.assert_close(layer(fold, x, *found), normed(behind, between, second))


def test_a_wrong_fold_is_seen_though_the_norm_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias of a new norm is zero, so that its sign cannot be seen in what the model computes now."""
    right = Fold.__call__

    def wrong(fold: Fold, weight: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        made, bias = right(fold, weight, *rest)
        return made, bias - 2 * rest[2]

    monkeypatch.setattr(Fold, "__call__", wrong)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    fast = fxopt.optimize(model, "fold_batchnorm", example_inputs=torch.randn(2, 3, 8, 8), measure=False)
    (decision,) = fxopt.plan(fast).decisions
    assert decision.status != "applied" and "off by" in decision.reason
