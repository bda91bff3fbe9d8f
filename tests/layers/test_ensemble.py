"""Each batched operation against its definition: one call for each member, in float64."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxopt.layers import ensemble
from fxopt.layers.ensemble import (
    align_members,
    batched_linear,
    concatenate_members,
    gather_members,
    grouped_linear,
    select_members,
    shared_batched_linear,
    shared_grouped_linear,
    stack_members,
    sum_members,
    unbind_members,
    wide_linear,
)
from fxopt.layers.vectorized import VectorizedMembers

Linear = Callable[..., Tensor]
SHARED = [wide_linear, shared_batched_linear, shared_grouped_linear]
SEPARATE = [batched_linear, grouped_linear]
LEADING = [(), (1,), (3,), (0,), (2, 3), (2, 0), (2, 1, 4)]


def members(count: int = 5, outputs: int = 3, inputs: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(count, outputs, inputs, dtype=torch.double), torch.randn(count, outputs, dtype=torch.double)


def one_by_one(x: Tensor, weight: Tensor, bias: Tensor | None, *, shared: bool) -> Tensor:
    return torch.stack(
        [F.linear(x if shared else x[i], weight[i], None if bias is None else bias[i]) for i in range(len(weight))]
    )


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("linear", SHARED)
def test_linears_of_one_input(linear: Linear, leading: tuple[int, ...], biased: bool):
    weight, bias = members()
    x = torch.randn(*leading, 4, dtype=torch.double)
    found = linear(x, weight, bias if biased else None)
    torch.testing.assert_close(found, one_by_one(x, weight, bias if biased else None, shared=True))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("linear", SEPARATE)
def test_linears_of_an_input_each(linear: Linear, leading: tuple[int, ...], biased: bool):
    weight, bias = members()
    x = torch.randn(5, *leading, 4, dtype=torch.double)
    found = linear(x, weight, bias if biased else None)
    torch.testing.assert_close(found, one_by_one(x, weight, bias if biased else None, shared=False))


@pytest.mark.parametrize("linear", [*SHARED, *SEPARATE])
def test_strided_operands(linear: Linear):
    weight = torch.randn(4, 5, 3, dtype=torch.double).permute(1, 2, 0)
    bias = torch.randn(3, 5, dtype=torch.double).t()
    shared = linear in SHARED
    x = torch.randn(4, 6, *(() if shared else (5,)), dtype=torch.double).permute(*((1, 0) if shared else (2, 1, 0)))
    torch.testing.assert_close(linear(x, weight, bias), one_by_one(x, weight, bias, shared=shared))


@pytest.mark.parametrize("linear", [*SHARED, *SEPARATE])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_gradients(linear: Linear, leading: tuple[int, ...]):
    weight, bias = members()
    shape = (*leading, 4) if linear in SHARED else (5, *leading, 4)
    operands = (torch.randn(shape, dtype=torch.double), weight, bias)
    assert torch.autograd.gradcheck(linear, [operand.requires_grad_() for operand in operands])


@pytest.mark.parametrize("linear", [*SHARED, *SEPARATE])
def test_a_vmap_outside(linear: Linear):
    weight, bias = members()
    shape = (3, 4) if linear in SHARED else (5, 3, 4)
    x = torch.randn(2, *shape, dtype=torch.double)
    found = torch.func.vmap(lambda one: linear(one, weight, bias))(x)
    torch.testing.assert_close(found, torch.stack([linear(one, weight, bias) for one in x]))


@pytest.mark.parametrize("linear", [*SHARED, *SEPARATE])
def test_autocast_computes_in_the_low_dtype_as_the_members_do(linear: Linear):
    weight, bias = (tensor.float() for tensor in members())
    x = torch.randn((3, 4) if linear in SHARED else (5, 3, 4))
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = linear(x, weight, bias), one_by_one(x, weight, bias, shared=linear in SHARED)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)


class Caller(nn.Module):
    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear
        self.weight, self.bias = map(nn.Parameter, members())

    def forward(self, x: Tensor) -> Tensor:
        return concatenate_members(self.linear(x, self.weight, self.bias).tanh(), -1)


@pytest.mark.parametrize("linear", [*SHARED, *SEPARATE])
def test_compiles_whole_and_exports_with_a_free_batch(linear: Linear):
    module = Caller(linear)
    make = (
        (lambda b: torch.randn(b, 4, dtype=torch.double))
        if linear in SHARED
        else (lambda b: torch.randn(5, b, 4).double())
    )
    batch = 0 if linear in SHARED else 1
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    dynamic = ({batch: torch.export.Dim("batch", min=2, max=64)},)
    exported = torch.export.export(module, (make(3),), dynamic_shapes=dynamic).module()
    for size in (3, 7):
        x = make(size)
        torch.testing.assert_close(compiled(x), module(x))
        torch.testing.assert_close(exported(x), module(x))


def test_layouts_carry_through_an_ensemble():
    """Each member's results lie together, whichever form computed them: what follows need not copy."""
    weight, bias = members()
    x = torch.randn(7, 4, dtype=torch.double)
    wide = wide_linear(x, weight, bias)
    assert wide.mT.is_contiguous()
    following = torch.randn(5, 2, 3, dtype=torch.double)
    assert batched_linear(wide.tanh(), following, bias[:, :2]).mT.is_contiguous()
    shared = shared_batched_linear(x, weight, bias)
    assert shared.is_contiguous()
    assert batched_linear(shared.tanh(), following, bias[:, :2]).is_contiguous()


def test_both_forms_of_the_batched_product_agree():
    weight, bias = members()
    x = torch.randn(5, 4, 7, dtype=torch.double).mT
    for each in (bias, None):
        torch.testing.assert_close(batched_linear(x, weight, each), batched_linear(x.contiguous(), weight, each))
    x.requires_grad_()
    assert torch.autograd.gradcheck(batched_linear, (x, weight.requires_grad_(), bias.requires_grad_()))


# -- operands and joins --------------------------------------------------------------------------------------------


def layouts() -> list[Tensor]:
    """Return members [5, 2, 3, 4], laid out in several ways, and empty ones."""
    numbers = torch.arange(120.0)
    plain, transposed, last = (
        numbers.view(5, 2, 3, 4),
        numbers.view(5, 2, 4, 3).mT,
        numbers.view(2, 3, 4, 5).movedim(-1, 0),
    )
    return [plain, transposed, last, torch.empty(5, 2, 0, 4)]


@pytest.mark.parametrize("dim", range(-4, 4))
@pytest.mark.parametrize("x", layouts(), ids=["plain", "transposed", "last", "empty"])
def test_stack_is_torch_stack(dim: int, x: Tensor):
    found, expected = stack_members(x, dim), torch.stack(list(x), dim)
    assert torch.equal(found, expected)
    assert found.is_contiguous()


@pytest.mark.parametrize("dim", range(-3, 3))
@pytest.mark.parametrize("x", layouts(), ids=["plain", "transposed", "last", "empty"])
def test_concatenate_is_torch_cat(dim: int, x: Tensor):
    found, expected = concatenate_members(x, dim), torch.cat(list(x), dim)
    assert torch.equal(found, expected)
    assert found.is_contiguous()


@pytest.mark.parametrize("x", layouts()[:3], ids=["plain", "transposed", "last"])
def test_members_come_out_as_they_would_have(x: Tensor):
    parts = unbind_members(x)
    assert len(parts) == 5
    assert all(torch.equal(part, one) and part.is_contiguous() for part, one in zip(parts, x, strict=True))
    total = sum_members(x)
    torch.testing.assert_close(total, torch.stack(list(x)).sum(0))
    assert total.is_contiguous()


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 1, 4), (3, 0, 4), (3, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("copy", [False, True])
def test_members_can_be_written_one_by_one(shape: tuple[int, ...], copy: bool):
    leaf = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    stacked = leaf * 2
    first, second, third = unbind_members(stacked, copy=copy)
    first.mul_(3)
    second.add_(leaf[0])
    assert [tuple(part.shape) for part in (first, second, third)] == [shape[1:]] * 3
    expected = torch.stack([leaf[0] * 6, leaf[1] * 2 + leaf[0], leaf[2] * 2])
    assert torch.equal(torch.stack([first, second, third]), expected)
    assert not copy or torch.equal(stacked, leaf * 2)
    (found,) = torch.autograd.grad(sum(part.square().sum() for part in (first, second, third)), leaf)
    (wanted,) = torch.autograd.grad(expected.square().sum(), leaf)
    torch.testing.assert_close(found, wanted)


def test_members_come_out_of_vmap_and_export():
    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return list(unbind_members(x * 2))

    x = torch.randn(3, 2, 4)
    batched = torch.func.vmap(Doubled())(torch.stack([x, -x]))
    assert all(torch.equal(part[1], -2 * x[number]) for number, part in enumerate(batched))
    exported = torch.export.export(Doubled(), (x,), dynamic_shapes=({1: torch.export.Dim.AUTO},)).run_decompositions()
    wider = torch.randn(3, 5, 4)
    assert all(torch.equal(one, 2 * part) for one, part in zip(exported.module()(wider), wider, strict=True))


@pytest.mark.parametrize("dim", range(-2, 2))
@pytest.mark.parametrize("x", [torch.randn(5, 1, 3), torch.randn(3, 1, 5).mT.transpose(0, 1), torch.randn(5, 1, 0)])
def test_concatenating_one_row_is_torch_cat(dim: int, x: Tensor):
    found, expected = concatenate_members(x, dim), torch.cat(list(x), dim)
    assert torch.equal(found, expected)
    assert found.shape == expected.shape
    assert found.is_contiguous()


@pytest.mark.parametrize(("shape", "dim"), [((5, 2), 1), ((5, 2), -2), ((5,), 0), ((5,), -1)])
def test_concatenate_refuses_a_dimension_that_members_lack(shape: tuple[int, ...], dim: int):
    with pytest.raises(IndexError, match=f"along dimension {dim}"):
        concatenate_members(torch.randn(shape), dim)


@pytest.mark.parametrize("dim", range(-3, 3))
def test_select_takes_the_first_slices(dim: int):
    x = torch.randn(6, 6, 6)
    found = select_members(x, dim, 4)
    assert torch.equal(found, torch.stack([x.select(dim, i) for i in range(4)]))
    assert found.data_ptr() == x.data_ptr()


def test_select_refuses_too_few():
    with pytest.raises(IndexError, match=r"4 members read dimension -1 .* \[6, 3\]"):
        select_members(torch.randn(6, 3), -1, 4)


def test_gather_stacks():
    tensors = [torch.randn(2, 3) for _ in range(4)]
    assert torch.equal(gather_members(*tensors), torch.stack(tensors))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_aligned_members_broadcast_as_members_do(rank: int):
    small, wide = torch.randn(5, *(3, 4)[2 - rank :]), torch.randn(5, 2, 3, 4)
    expected = torch.stack([one * other for one, other in zip(small, wide, strict=True)])
    assert torch.equal(align_members(small, wide) * wide, expected)


# -- any member ----------------------------------------------------------------------------------------------------


def vectorized() -> VectorizedMembers:
    graph = fx.Graph()
    x, weight, bias = (graph.placeholder(name) for name in ("x", "weight", "bias"))
    graph.output(graph.call_function(torch.tanh, (graph.call_function(F.linear, (x, weight, bias)),)))
    return VectorizedMembers(fx.GraphModule(nn.Module(), graph, "Member"), (None, 0, 0))


@pytest.mark.parametrize("leading", LEADING)
def test_vectorized_members(leading: tuple[int, ...]):
    weight, bias = members()
    x = torch.randn(*leading, 4, dtype=torch.double)
    module = vectorized()
    for same in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(same(x, weight, bias), one_by_one(x, weight, bias, shared=True).tanh())


def test_vectorized_members_train_compile_and_export():
    weight, bias = (tensor.requires_grad_() for tensor in members())
    x = torch.randn(3, 4, dtype=torch.double)
    module = vectorized()
    assert torch.autograd.gradcheck(module, (x, weight, bias))
    operands = (x, weight.detach(), bias.detach())
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="eager")(*operands), module(*operands))
    torch.testing.assert_close(torch.export.export(module, operands).module()(*operands), module(*operands))
    assert "in_dims=(None, 0, 0)" in repr(module)


def test_vectorized_members_drop_different_units():
    graph = fx.Graph()
    graph.output(graph.call_function(F.dropout, (graph.placeholder("x"), 0.5)))
    module = VectorizedMembers(fx.GraphModule(nn.Module(), graph, "Member"), (0,))
    one, other = module(torch.ones(2, 64))
    assert not torch.equal(one, other)


def test_functions_pickle_by_name():
    for name in ensemble.__all__:
        assert pickle.loads(pickle.dumps(getattr(ensemble, name))) is getattr(ensemble, name)
