"""What every operator keeps: torch's own checks, gradients, transforms, capture, export, archives."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import fxopt
from fxopt import cuda_ops
from fxopt.operators import operator_info

Make = Callable[[torch.dtype], tuple[Any, ...]]


def leaf(*shape: int, dtype: torch.dtype = torch.float64, low: float = -2.0) -> Tensor:
    return (torch.rand(shape, dtype=torch.float64) * (2 - low) + low).to(dtype).requires_grad_()


def transposed(dtype: torch.dtype, low: float = -2.0) -> Tensor:
    return leaf(4, 3, dtype=dtype, low=low).detach().t().requires_grad_()


def fixed(*shape: int, dtype: torch.dtype, low: float = -2.0) -> Tensor:
    return leaf(*shape, dtype=dtype, low=low).detach()


def head(dtype: torch.dtype, leading: int = 5) -> tuple[Any, ...]:
    """Return rows, weight, bias and targets, one of which is ignored."""
    return leaf(leading, 4, dtype=dtype), leaf(6, 4, dtype=dtype), leaf(6, dtype=dtype), TARGET


def members(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return weights and biases of three members 4-5-2, whose last layer has no bias."""
    weights = [leaf(3, 5, 4, dtype=dtype), leaf(3, 2, 5, dtype=dtype)]
    return weights, [leaf(3, 5, dtype=dtype), torch.empty(0, dtype=dtype)]


TARGET = torch.tensor([1, 5, -100, 0, 1])
KEY = torch.tensor([7, 0])
EDGES = torch.tensor([[0, 0, 1, 2, 4, 4, 5, 3], [1, 2, 2, 3, 5, 6, 6, 3]])
BATCH = torch.tensor([0, 0, 0, 0, 1, 1, 1])
SIMPLE = torch.ops.fxopt.oriented_edges.default(EDGES, BATCH, 2, -1)[0]
ORIENTED = torch.tensor([[0, 0, 1, 1, 2, 4, 4, 5], [1, 2, 2, 3, 3, 5, 6, 6]])
NEAR = torch.ops.fxopt.near_pairs.default(SIMPLE, BATCH, 2, "distance")
COMMON = (torch.ops.fxopt.near_pairs.default(SIMPLE, BATCH, 0, "codegree"), BATCH, "common", 0, 2**20, [True] * 4)
TRIANGLES = (SIMPLE, BATCH, "closed", 0, 2**20, [False, True, True, True])
CALLS: dict[str, Mapping[str, Make]] = {
    "add": {
        "broadcast": lambda t: (leaf(3, 4, dtype=t), leaf(4, dtype=t), 0.5),
        "column": lambda t: (leaf(3, 1, dtype=t), leaf(1, 4, dtype=t)),
        "transposed": lambda t: (transposed(t), leaf(3, 4, dtype=t).detach()),
        "empty": lambda t: (leaf(0, 4, dtype=t), leaf(4, dtype=t)),
        "scalars": lambda t: (leaf(dtype=t), leaf(dtype=t), 2.0),
    },
    "log_clip": {
        "unclipped": lambda t: (leaf(3, 4, dtype=t, low=0.5), 0.1),
        "transposed": lambda t: (transposed(t, low=0.5), 0.1),
        "empty": lambda t: (leaf(0, dtype=t), 0.1),
    },
    "log_clip_backward": {
        "mixed": lambda t: (leaf(3, 4, dtype=t), leaf(3, 4, dtype=t), 0.1),
        "broadcast": lambda t: (leaf(1, dtype=t).expand(3, 4).detach(), leaf(3, 4, dtype=t), 0.1),
    },
    "bias_act": {
        "everything": lambda t: (leaf(3, 4, dtype=t), leaf(4, dtype=t), leaf(3, 4, dtype=t), KEY, "gelu", 0.5),
        "plain": lambda t: (transposed(t), None, None, None, "silu", 0.0),
        "vector": lambda t: (leaf(4, dtype=t), leaf(4, dtype=t), None, None, "tanh", 0.0),
        "scalar": lambda t: (leaf(dtype=t), None, None, None, "sigmoid", 0.0),
        "dropped": lambda t: (leaf(3, 4, dtype=t), None, None, KEY, "gelu_tanh", 1.0),
        "biased": lambda t: (leaf(3, 4, dtype=t), leaf(4, dtype=t), None, None, "sigmoid", 0.0),
        "relu": lambda t: (leaf(3, 4, dtype=t, low=0.5), None, None, None, "relu", 0.0),
    },
    "bias_act_backward": {
        "everything": lambda t: (fixed(3, 4, dtype=t), fixed(3, 4, dtype=t), fixed(4, dtype=t), KEY, "gelu", 0.5),
    },
    "ensemble_mlp": {
        "shared": lambda t: (leaf(3, 4, dtype=t), *members(t), "tanh"),
        "own": lambda t: (leaf(3, 2, 4, dtype=t).mT.contiguous().mT, *members(t), "gelu"),
        "one layer": lambda t: (fixed(3, 4, dtype=t), *(each[:1] for each in members(t)), "relu"),
        "empty": lambda t: (leaf(0, 4, dtype=t), *members(t), "silu"),
    },
    "ensemble_mlp_backward": {
        "shared": lambda t: (fixed(3, 3, 2, dtype=t), leaf(3, 4, dtype=t), *members(t), "tanh", True),
        "own": lambda t: (fixed(3, 2, 2, dtype=t), leaf(3, 2, 4, dtype=t), *members(t), "silu", False),
    },
    "gated": {
        "silu": lambda t: (leaf(3, 4, dtype=t), leaf(3, 4, dtype=t), "silu"),
        "gelu": lambda t: (transposed(t), leaf(3, 4, dtype=t), "gelu"),
        "gelu_tanh": lambda t: (leaf(3, 4, dtype=t), transposed(t), "gelu_tanh"),
        "empty": lambda t: (leaf(0, 4, dtype=t), leaf(0, 4, dtype=t), "silu"),
    },
    "gated_backward": {
        "silu": lambda t: (fixed(3, 4, dtype=t), fixed(3, 4, dtype=t), fixed(3, 4, dtype=t), "silu"),
    },
    "linear_cross_entropy": {
        "biased": lambda t: (*head(t), None, -100, 0.1, 0.0, 0.0, 2),
        "plain": lambda t: (leaf(5, 4, dtype=t), leaf(6, 4, dtype=t), None, TARGET, None, -100, 0.0, 0.0, 0.0, 0),
        "empty": lambda t: (leaf(0, 4, dtype=t), leaf(6, 4, dtype=t), None, TARGET[:0], None, -100, 0.0, 0.0, 0.0, 0),
    },
    "linear_cross_entropy_sum": {
        "biased": lambda t: (*head(t), None, -100, 0.1, 0.0, 0.0, 2),
        "plain": lambda t: (leaf(5, 4, dtype=t), leaf(6, 4, dtype=t), None, TARGET, None, -100, 0.0, 0.0, 0.0, 3),
    },
    "linear_cross_entropy_step": {
        "biased": lambda t: (*(each.detach() for each in head(t)), None, -100, 0.1, 0.0, 0.0, 2),
    },
    "linear_cross_entropy_backward": {
        "biased": lambda t: (fixed(5, dtype=t), *(e.detach() for e in head(t)), None, -100, 0.1, 0.0, 0.0, 2),
    },
    "rms_norm": {
        "added": lambda t: (leaf(3, 4, dtype=t), leaf(4, dtype=t), leaf(3, 4, dtype=t), 1e-6),
        "plain": lambda t: (transposed(t), None, None, 1e-6),
        "vector": lambda t: (leaf(4, dtype=t), leaf(4, dtype=t), None, 1e-6),
        "empty": lambda t: (leaf(0, 4, dtype=t), leaf(4, dtype=t), leaf(0, 4, dtype=t), 1e-6),
    },
    "rms_norm_backward": {
        "added": lambda t: (*(fixed(3, 4, dtype=t) for _ in range(3)), fixed(4, dtype=t), fixed(3, 1, dtype=t)),
    },
    "layer_norm": {
        "added": lambda t: (leaf(3, 4, dtype=t), leaf(4, dtype=t), leaf(4, dtype=t), leaf(3, 4, dtype=t), 1e-6),
        "plain": lambda t: (transposed(t), None, None, None, 1e-6),
        "vector": lambda t: (leaf(4, dtype=t), leaf(4, dtype=t), None, None, 1e-6),
    },
    "layer_norm_backward": {
        "added": lambda t: (
            *(fixed(3, 4, dtype=t) for _ in range(3)),
            fixed(4, dtype=t),
            fixed(4, dtype=t),
            fixed(3, 1, dtype=t),
            fixed(3, 1, dtype=t),
        ),
    },
    "rotary_embedding": {
        "heads": lambda t: (leaf(2, 3, 5, 4, dtype=t), fixed(5, 4, dtype=t), fixed(2, 1, 5, 4, dtype=t)),
        "rows": lambda t: (transposed(t), fixed(3, 4, dtype=t), fixed(1, 4, dtype=t), True),
        "vector": lambda t: (leaf(4, dtype=t), fixed(4, dtype=t), fixed(4, dtype=t)),
        "odd": lambda t: (leaf(3, 5, dtype=t), leaf(5, dtype=t), leaf(3, 5, dtype=t)),
        "odd, inverse": lambda t: (leaf(3, 5, dtype=t), leaf(5, dtype=t), leaf(3, 5, dtype=t), True),
    },
    "bernoulli_sigmoid": {
        "biased": lambda t: (leaf(3, 4, dtype=t), leaf(4, dtype=t), KEY),
        "plain": lambda t: (transposed(t), None, KEY),
        "vector": lambda t: (leaf(4, dtype=t), leaf(4, dtype=t), KEY),
        "scalar": lambda t: (leaf(dtype=t), None, KEY),
    },
    "near_pairs": {
        "two": lambda _: (SIMPLE, BATCH, 2, "distance"),
        "codegree": lambda _: (SIMPLE, BATCH, 2, "codegree"),
        "empty": lambda _: (SIMPLE[:, :0], BATCH[:0], 3, "distance"),
    },
    "oriented_edges": {
        "two": lambda _: (EDGES, BATCH, 2, -1),
        "empty": lambda _: (EDGES[:, :0], BATCH[:0], 0, 4),
    },
    "triangles": {
        "two": lambda _: (ORIENTED[0], ORIENTED[1], 7, 2**20),
        "empty": lambda _: (ORIENTED[0, :0], ORIENTED[1, :0], 0, 1),
    },
    "triple_products": {
        "closed": lambda t: (*(leaf(7, 2, dtype=t) for _ in range(3)), leaf(2, 2, dtype=t), *TRIANGLES),
        "near": lambda t: (
            *(leaf(7, 2, dtype=t) for _ in range(3)),
            leaf(8, 2, dtype=t),
            NEAR,
            BATCH,
            "near",
            2,
            2**20,
            [True] * 4,
        ),
        "common": lambda t: (*(leaf(7, 2, dtype=t) for _ in range(3)), leaf(2, 2, dtype=t), *COMMON),
    },
}
WITHOUT_VMAP = ("near_pairs", "oriented_edges", "triangles", "triple_products")
each_operator = pytest.mark.parametrize("name", CALLS)
each_call = pytest.mark.parametrize(("name", "case"), [(name, case) for name, calls in CALLS.items() for case in calls])


def operator(name: str) -> Callable[..., Any]:
    return getattr(torch.ops.fxopt, name).default


def flat(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def differentiable(results: Any) -> tuple[Tensor, ...]:
    return tuple(result for result in flat(results) if result.requires_grad)


def first_call(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return next(iter(CALLS[name].values()))(dtype)


def test_every_operator_is_called_here_and_described_once():
    assert {f"fxopt::{name}" for name in CALLS} == set(cuda_ops.NAMES)
    for name in cuda_ops.NAMES:
        info = operator_info(name)
        assert (info.pure, info.random, info.fresh) == (True, False, True)


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, calls in CALLS.items() for case in list(calls)[:2]])
def test_torch_accepts_the_registrations(name: str, case: str):
    every = case == next(iter(CALLS[name]))
    utilities = {} if every else {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(operator(name), CALLS[name][case](torch.float32), **utilities)


def takes_gradients(args: tuple[Any, ...]) -> bool:
    return any(isinstance(arg, Tensor) and arg.requires_grad for arg in tree_leaves(args))


def gradients_are_right(name: str, args: tuple[Any, ...]) -> bool:
    """Compare them with differences; lists of tensors are flattened, as `gradcheck` looks into none."""
    leaves, form = tree_flatten(args)
    return torch.autograd.gradcheck(
        lambda *given: differentiable(operator(name)(*tree_unflatten(given, form))), tuple(leaves)
    )


@each_call
def test_results_are_contiguous_and_gradients_are_right(name: str, case: str):
    args = CALLS[name][case](torch.float64)
    assert all(result.is_contiguous() for result in flat(operator(name)(*args)))
    if takes_gradients(args):
        assert gradients_are_right(name, args)


@each_operator
def test_gradients_of_single_operands_are_right(name: str):
    for kept in range(2):
        leaves, form = tree_flatten(first_call(name, torch.float64))
        single = [e.detach() if isinstance(e, Tensor) and i != kept else e for i, e in enumerate(leaves)]
        args = tree_unflatten(single, form)
        if takes_gradients(args):
            assert gradients_are_right(name, args)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in WITHOUT_VMAP])
def test_vmap_computes_what_a_loop_does(name: str):
    members, form = zip(*(tree_flatten(first_call(name, torch.float64)) for _ in range(3)), strict=True)
    first = members[0]
    for batched in (i for i, leaf in enumerate(first) if isinstance(leaf, Tensor)):
        along = 1 if first[batched].dim() else 0
        given = [torch.stack([m[i] for m in members], along) if i == batched else e for i, e in enumerate(first)]
        place = tree_unflatten([along if i == batched else None for i in range(len(first))], form[0])
        got = torch.func.vmap(operator(name), place)(*tree_unflatten(given, form[0]))
        for number, member in enumerate(members):
            alone = [member[i] if i == batched else e for i, e in enumerate(first)]
            expected = operator(name)(*tree_unflatten(alone, form[0]))
            for one, other in zip(flat(got), flat(expected), strict=True):
                torch.testing.assert_close(one[number], other)


@each_operator
def test_every_transform_of_torch_func_gives_the_gradients(name: str):
    leaves, form = tree_flatten(first_call(name, torch.float64))
    wanted = [place for place, each in enumerate(leaves) if isinstance(each, Tensor) and each.requires_grad]
    if not wanted:
        return

    attached = [each.requires_grad for each in flat(operator(name)(*tree_unflatten(leaves, form)))]

    def numbers(*given: Tensor) -> Tensor:
        whole = [given[wanted.index(i)] if i in wanted else each for i, each in enumerate(leaves)]
        found = zip(flat(operator(name)(*tree_unflatten(whole, form))), attached, strict=True)
        parts = [each.sin() * torch.arange(1.0, each.numel() + 1).view(each.shape) for each, counts in found if counts]
        return torch.stack([part.sum() for part in parts]).sum()

    given = tuple(leaves[place] for place in wanted)
    expected = torch.autograd.grad(numbers(*given), given)
    places = tuple(range(len(given)))
    given = tuple(each.detach() for each in given)
    tangents = tuple(each.cos() for each in given)
    found = torch.func.grad(numbers, places)(*given)
    members = [torch.stack([each, each]) for each in given]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(torch.vmap(torch.func.grad(numbers, places))(*members), expected, strict=True):
        torch.testing.assert_close(mine[1], theirs)
    along = torch.stack([(one * other).sum() for one, other in zip(expected, tangents, strict=True)]).sum()
    torch.testing.assert_close(torch.func.jvp(numbers, given, tangents)[1], along)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(one, other) for one, other in zip(given, tangents, strict=True)]
        torch.testing.assert_close(forward_ad.unpack_dual(numbers(*duals)).tangent, along)
    for mine, theirs in zip(torch.func.jacfwd(numbers, places)(*given), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_second_gradients_count_an_operand_that_is_given_twice_once():
    x = leaf(3, 4)

    def slope(of: Tensor, swiglu: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(swiglu(of, of).sin().sum(), of, create_graph=True)
        return torch.autograd.grad(first.square().sum(), of)[0]

    torch.testing.assert_close(slope(x, cuda_ops.swiglu), slope(x, lambda gate, value: F.silu(gate) * value))


def test_operands_take_the_widest_dtype_where_autocast_is_on():
    narrow, wide = torch.rand(3, 4).bfloat16(), torch.rand(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.ops.fxopt.gated.default(narrow, wide, "silu")
    torch.testing.assert_close(found, F.silu(narrow.float()) * wide)


class Everything(nn.Module):
    """Calls every public function of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("key", torch.tensor([3, 1]))
        self.register_buffer("angles", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        x = cuda_ops.add(self.linear(x), x, alpha=0.5)
        probability, sample = cuda_ops.bernoulli_sigmoid(x, self.linear.bias, seed=self.key)
        x = (
            cuda_ops.rotary_embedding(cuda_ops.log_clip(probability, 0.3), self.angles.cos(), self.angles.sin())
            + sample
        )
        x = cuda_ops.bias_act(x, self.linear.bias, "gelu", residual=x, dropout=0.5, seed=self.key)
        normed, x = cuda_ops.add_rms_norm(cuda_ops.rms_norm(x), x, self.linear.bias)
        normed, x = cuda_ops.add_layer_norm(cuda_ops.layer_norm(x, self.linear.bias), normed)
        x = cuda_ops.swiglu(normed, x) + cuda_ops.geglu(x, normed)
        x = cuda_ops.ensemble_mlp(x, [self.linear.weight[None]] * 2, [self.linear.bias[None], None], "silu")[0]
        return x + cuda_ops.linear_cross_entropy(x, self.linear.weight, self.key.new_ones(x.shape[0]), self.linear.bias)


def test_capture_keeps_each_call_as_one_node():
    model, x = Everything(), torch.randn(5, 8)
    program = fxopt.capture(model, x)
    captured = program.model
    targets = [str(node.target) for node in program.graphs[""].nodes if node.op == "call_function"]
    called = (
        "add bernoulli_sigmoid log_clip rotary_embedding bias_act rms_norm rms_norm layer_norm layer_norm gated gated "
        "ensemble_mlp linear_cross_entropy_sum"
    )
    expected = [f"fxopt.{name}.default" for name in called.split()]
    assert [target for target in targets if target.startswith("fxopt.")] == expected
    for rows in (5, 2):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(captured(x), model(x), rtol=0, atol=0)


def test_pickles_find_the_operators():
    x = torch.randn(5, 8)
    captured = fxopt.capture(Everything(), x).model
    again = pickle.loads(pickle.dumps(captured))
    torch.testing.assert_close(again(x), captured(x), rtol=0, atol=0)


def test_optimize_fuses_members_that_call_operators():
    class Member(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return cuda_ops.log_clip(cuda_ops.add(self.linear(x), x).sigmoid(), 0.2)

    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.members = nn.ModuleList(Member() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([member(x) for member in self.members])

    model, x = Ensemble(), torch.randn(3, 8)
    fused = fxopt.optimize(model, passes="fuse_ensembles{lowering=vmap}", example_inputs=x, measure=False)
    assert len(fxopt.plan(fused).decisions) == 1
    torch.testing.assert_close(fused(x), model(x))


def test_torch_compile_computes_the_same():
    model, x = Everything(), torch.randn(5, 8)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    got = torch.autograd.grad(compiled(x).sum(), model.linear.weight)
    torch.testing.assert_close(got, torch.autograd.grad(model(x).sum(), model.linear.weight))


def test_exported_files_hold_the_operators_and_load_again(tmp_path):
    model, x = Everything().eval(), torch.randn(5, 8)
    fxopt.export(model, tmp_path / "model.pt2", x)
    loaded = fxopt.load(tmp_path / "model.pt2")
    torch.testing.assert_close(loaded(x), model(x))


def test_under_autocast_probabilities_and_logs_are_float32():
    x = torch.rand(3, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert cuda_ops.log_clip(x).dtype == torch.float32
        assert [each.dtype for each in cuda_ops.bernoulli_sigmoid(x)] == [torch.float32] * 2
        assert cuda_ops.add(x, x).dtype == torch.bfloat16
        assert cuda_ops.ensemble_mlp(x.float(), [x.float()[None]]).dtype == torch.bfloat16


def test_second_derivatives_are_right():
    x, target = torch.rand(3, 4, dtype=torch.float64, requires_grad=True), torch.tensor([0, -100, 2])
    for call in (
        cuda_ops.log_clip,
        lambda x: cuda_ops.add(x * x, x),
        lambda x: cuda_ops.bernoulli_sigmoid(x, seed=0)[0],
        lambda x: cuda_ops.swiglu(x, x * x),
        lambda x: cuda_ops.geglu(x, x * x),
        lambda x: cuda_ops.bias_act(x, x[0], "tanh", residual=x),
        lambda x: cuda_ops.rms_norm(x, x[0]),
        lambda x: cuda_ops.add_rms_norm(x, x * x, x[0]),
        lambda x: cuda_ops.layer_norm(x, x[0], x[1]),
        lambda x: cuda_ops.linear_cross_entropy(x, x * x, target, x[:, 0], label_smoothing=0.1),
        lambda x: cuda_ops.linear_cross_entropy(x, x, target, reduction="sum"),
        lambda x: cuda_ops.linear_cross_entropy(x, x, target, reduction="none"),
        lambda x: cuda_ops.ensemble_mlp(x[:, None], [x[None, :, :], x.mT[None]], [x[None, :, 0], None], "tanh"),
    ):
        assert torch.autograd.gradgradcheck(call, x)


def test_rotary_tables_have_gradients_where_they_are_asked_for():
    x, cos, sin = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 4), (3, 4), (4,)))
    assert torch.autograd.gradcheck(cuda_ops.rotary_embedding, (x, cos, sin))
    assert torch.autograd.gradgradcheck(cuda_ops.rotary_embedding, (x, cos, sin))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_derivatives_of_norms_are_those_of_torch_in_narrow_dtypes(dtype: torch.dtype):
    x, weight = (torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((3, 8), (8,)))
    found = []
    for norm in (
        lambda: cuda_ops.rms_norm(x, weight, 1e-6), lambda: F.rms_norm(x, (8,), weight, 1e-6),
        lambda: cuda_ops.layer_norm(x, weight), lambda: F.layer_norm(x, (8,), weight),
    ):  # fmt: skip
        (gradient,) = torch.autograd.grad(norm().square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), (x, weight)))
    for mine, torchs in (found[:2], found[2:]):
        for a, b in zip(mine, torchs, strict=True):
            assert (a - b).abs().max() <= 0.05 * b.abs().max()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: cuda_ops.add(x.long(), x), "add: x is int64; pass a floating-point tensor"),
        (lambda x: cuda_ops.add(x, x.to("meta")), "add: y is on meta, x on cpu; move one of them"),
        (lambda x: cuda_ops.log_clip(x.int()), "log_clip: x is int32; pass a floating-point tensor"),
        (lambda x: cuda_ops.log_clip(x, 0.0), "log_clip: minimum is 0.0; pass a number of at least 1.18e-38"),
        (lambda x: cuda_ops.log_clip(x.half(), 1e-7), "log_clip: minimum is 1e-07; pass a number of at least 6.10e-05"),
        (lambda x: cuda_ops.bernoulli_sigmoid(x, x[0].double()), "bias is float64, x is float32; cast one of them"),
        (lambda x: cuda_ops.bernoulli_sigmoid(x, x), r"bias has shape \(3, 4\), expected \(4,\)"),
        (lambda x: cuda_ops.bernoulli_sigmoid(x[0, 0], x[0, 0]), "x has no dimension that bias could go along"),
        (lambda x: cuda_ops.bias_act(x, activation="selu"), "bias_act: activation is 'selu'; pass one of relu, gelu"),
        (lambda x: cuda_ops.bias_act(x, residual=x[0]), r"residual has shape \(4,\), expected \(3, 4\)"),
        (lambda x: cuda_ops.bias_act(x, dropout=2.0), "dropout is 2.0; pass a probability"),
        (lambda x: cuda_ops.ensemble_mlp(x, []), "^ensemble_mlp: weights is empty; pass one for each layer"),
        (lambda x: cuda_ops.ensemble_mlp(x, [x]), r"weights\[0\] has shape \(3, 4\), expected \(3, out, 4\)"),
        (
            lambda x: cuda_ops.ensemble_mlp(x, [x[None]] * 2),
            r"weights\[1\] has shape \(1, 3, 4\), expected \(1, out, 3\)",
        ),
        (
            lambda x: cuda_ops.ensemble_mlp(x, [x[None], x[:2, :3][None, None]]),
            r"weights\[1\] has shape \(1, 1, 2, 3\)",
        ),
        (
            lambda x: cuda_ops.ensemble_mlp(x[0], [x[None]], own_inputs=True),
            r"x has shape \(4,\), expected \(members, \.\.\., features\)",
        ),
        (lambda x: cuda_ops.ensemble_mlp(x[0, 0], [x[None]]), r"ensemble_mlp: x has shape \(\), expected \(\.\.\.,"),
        (
            lambda x: cuda_ops.ensemble_mlp(x[None], [x[None].expand(2, 3, 4)], own_inputs=True),
            r"x has shape \(1, 3, 4\), expected",
        ),
        (lambda x: cuda_ops.ensemble_mlp(x, [x[None]], []), "biases has 0 elements, weights 1; pass None where none"),
        (lambda x: cuda_ops.ensemble_mlp(x, [x[None]], [x]), r"biases\[0\] has shape \(3, 4\), expected \(1, 3\)"),
        (lambda x: cuda_ops.ensemble_mlp(x, [x[None].double()]), r"weights\[0\] is float64, x is float32; cast one"),
        (lambda x: cuda_ops.ensemble_mlp(x.int(), [x[None]]), "x is int32; pass a floating-point tensor"),
        (lambda x: cuda_ops.ensemble_mlp(x, [x[None].to("meta")]), r"weights\[0\] is on meta, x on cpu; move one"),
        (lambda x: cuda_ops.ensemble_mlp(x, [x[None]], activation="selu"), "activation is 'selu'; pass one of relu"),
        (lambda x: cuda_ops.rms_norm(x[0, 0]), "rms_norm: x has no dimension to go along"),
        (
            lambda x: cuda_ops.add_layer_norm(x, x[:2]),
            r"^add_layer_norm: residual has shape \(2, 4\), x \(3, 4\); they must broadcast",
        ),
        (lambda x: cuda_ops.layer_norm(x, x[0, :2]), r"^layer_norm: weight has shape \(2,\), expected \(4,\)"),
        (lambda x: cuda_ops.swiglu(x, x.half()), "^swiglu: value is float16, gate is float32; cast one of them"),
        (lambda x: cuda_ops.swiglu(x, x[0]), r"^swiglu: value has shape \(4,\), expected \(3, 4\)"),
        (lambda x: cuda_ops.geglu(x, x[0]), r"^geglu: value has shape \(4,\), expected \(3, 4\)"),
        (lambda x: cuda_ops.add_rms_norm(x, x[0, :2]), r"^add_rms_norm: residual has shape \(2,\), x \(3, 4\); they"),
        (lambda x: cuda_ops.bernoulli_sigmoid(x, seed=KEY, offset=1), "bernoulli_sigmoid: offset is 1, seed is a tens"),
        (lambda x: cuda_ops.bernoulli_sigmoid(x, offset=1), "offset is 1, seed is None, which draws both; leave"),
        (lambda x: cuda_ops.bias_act(x, dropout=0.5, seed=KEY, offset=2), "bias_act: offset is 2, seed is a tensor"),
        (lambda x: cuda_ops.geglu(x, x, "erf"), "geglu: approximate is 'erf'; pass 'none' or 'tanh'"),
        (lambda x: cuda_ops.rotary_embedding(x[0, 0], x, x), "rotary_embedding: x has no dimension to go along"),
        (lambda x: cuda_ops.rotary_embedding(x, x[:, :2], x), r"cos has shape \(3, 2\); expected what broadcasts to"),
        (lambda x: cuda_ops.linear_cross_entropy(x, x.t(), x[:, 0].long()), r"weight is \(4, 3\), x \(3, 4\)"),
        (lambda x: cuda_ops.linear_cross_entropy(x, x, x[:, 0].long() + 3), "target holds 3; pass 0 to 2, or -100"),
        (lambda x: cuda_ops.linear_cross_entropy(x, x, x[:, 0]), "target is torch.float32 of shape"),
        (lambda x: cuda_ops.linear_cross_entropy(x, x, x[:, 0].long(), reduction="max"), "reduction is 'max'; pass"),
        (
            lambda x: cuda_ops.linear_cross_entropy(x, x, x[:, 0].long(), x[0]),
            r"bias has shape \(4,\), expected \(3,\)",
        ),
        (lambda x: cuda_ops.bernoulli_sigmoid(x, seed=torch.zeros(2)), "key is float32 of shape"),
        (lambda x: operator("triangles")(x[0], x[0], 3, 1), r"source is \[4\] torch.float32; give one torch.int64"),
        (
            lambda x: operator("triangles")(KEY, KEY, 3, 1),
            "edge 0, from 7 to 7, is out of order; give edges from lower",
        ),
    ],
)
def test_bad_operands_are_named(call: Callable[[Tensor], object], message: str):
    with pytest.raises(fxopt.UsageError, match=message):
        call(torch.rand(3, 4))


@pytest.mark.parametrize("features", [4, 5])
def test_rotary_embeddings_are_what_is_written_by_hand(features: int):
    x, cos, sin = (torch.randn(*shape, features) for shape in ((2, 3), (3,), (3,)))
    half = features // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    torch.testing.assert_close(cuda_ops.rotary_embedding(x, cos, sin), x * cos + turned * sin)


def test_rotary_tables_of_more_rows_than_x_are_refused():
    with pytest.raises(fxopt.UsageError, match=r"cos has shape \(3, 4\); expected what broadcasts to \(1, 4\)"):
        cuda_ops.rotary_embedding(torch.randn(1, 4), torch.randn(3, 4), torch.randn(3, 4))
