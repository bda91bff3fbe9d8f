"""Verification objects to what is wrong, names it, and leaves honest rewrites alone."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt.errors import InputError
from fxopt.passes.sites import Numerics
from fxopt.passes.verification import Sizes, Verdict, reference, verify
from fxopt.runtime.state import Stack, StateMap

DTYPES = [torch.float32, torch.bfloat16]


@dataclass
class Call:
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


class Lambda(nn.Module):
    """Run a function of the module itself and its arguments; `children` become submodules, parameters or buffers."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def judge(
    before: nn.Module,
    after: nn.Module,
    *args: Any,
    map_state: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
    numerics: Numerics = Numerics.REASSOCIATED,
    training: bool | None = None,
    gradients: bool = True,
    keeps_form: bool = True,
    **kwargs: Any,
) -> Verdict:
    taken = reference(before, [Call(args, kwargs)], training=training, gradients=gradients, seed=3)
    return verify(taken, after, map_state=map_state, numerics=numerics, keeps_form=keeps_form)


def rewritten(module: Lambda, function: Callable[..., Any]) -> Lambda:
    """Return a module on the same parameters and buffers that runs another function."""
    after = copy.deepcopy(module)
    after.function = function
    return after


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


# -- honest rewrites ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.float16])
def test_the_same_module_passes(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3)).to(dtype)
    verdict = judge(module, copy.deepcopy(module), normal(4, 6, dtype=dtype))
    assert verdict == Verdict(True, "", 0.0, verdict.precision_error, "float64")


def logsumexp_by_hand(x: Tensor) -> Tensor:
    largest = x.amax(-1, keepdim=True).detach()
    return (x - largest).exp().sum(-1).log() + largest.squeeze(-1)


HONEST = {
    "sum order": (lambda m, x: x[0] + x[1] + x[2] + x[3], lambda m, x: (x[3] + x[2]) + (x[1] + x[0])),
    "mean of a stack": (lambda m, x: torch.stack(list(x)).mean(0), lambda m, x: sum(x) / len(x)),
    "linear": (lambda m, x: F.linear(x, m.w, m.b), lambda m, x: x @ m.w.T + m.b),
    "addmm": (lambda m, x: F.linear(x[0], m.w, m.b), lambda m, x: torch.addmm(m.b, x[0], m.w.T)),
    "factored out": (lambda m, x: x * m.b0 + x * m.c0, lambda m, x: x * (m.b0 + m.c0)),
    "cat and stack": (lambda m, x: torch.cat([y[None] for y in x]), lambda m, x: torch.stack(list(x))),
    "bmm": (lambda m, x: torch.stack([y @ m.w.T for y in x]), lambda m, x: torch.bmm(x, m.w.T.expand(len(x), -1, -1))),
    "logsumexp": (lambda m, x: x.logsumexp(-1), lambda m, x: logsumexp_by_hand(x)),
    "gelu": (lambda m, x: F.gelu(x), lambda m, x: x * 0.5 * (1 + torch.erf(x * 0.7071067811865476))),
    "sigmoid": (lambda m, x: x.sigmoid(), lambda m, x: 1 / (1 + (-x).exp())),
    "variance": (lambda m, x: x.var(-1, correction=0), lambda m, x: (x - x.mean(-1, keepdim=True)).square().mean(-1)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HONEST)
def test_reassociations_pass(name: str, dtype: torch.dtype) -> None:
    one, other = HONEST[name]
    members = {
        "w": nn.Parameter(normal(5, 6)), "b": nn.Parameter(normal(5)), "b0": normal(6), "c0": normal(6),
    }  # fmt: skip
    module = Lambda(one, **members).to(dtype)
    verdict = judge(module, rewritten(module, other), normal(4, 3, 6, dtype=dtype))
    assert verdict.ok, verdict.reason
    assert verdict.meaning_error < 1e-12


def test_a_gradient_that_is_zero_but_for_rounding_passes() -> None:
    """A bias before a batch norm has no effect: its gradient is pure rounding noise, on both sides another."""
    module = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def other(m: Any, x: Tensor) -> Tensor:
        first, norm, last = m.net
        y = x @ first.weight.T + first.bias
        y = (y - y.mean(0)) / (y.var(0, correction=0) + norm.eps).sqrt() * norm.weight + norm.bias
        return last(y)

    before = Lambda(lambda m, x: m.net(x), net=module)
    before.net[1].track_running_stats = False
    before.net[1].running_mean = before.net[1].running_var = before.net[1].num_batches_tracked = None
    verdict = judge(before, rewritten(before, other), normal(16, 8))
    assert verdict.ok, verdict.reason


def test_members_stacked_into_one_tensor_pass() -> None:
    before, after, map_state = ensemble_and_fused(5)
    verdict = judge(before, after, normal(3, 4), map_state=map_state)
    assert verdict.ok, verdict.reason


def ensemble_and_fused(count: int) -> tuple[nn.Module, nn.Module, Callable[[Mapping[str, Tensor]], dict[str, Tensor]]]:
    before = Lambda(
        lambda m, x: torch.stack([head(x) for head in m.heads], 1),
        heads=nn.ModuleList([nn.Linear(4, 3) for _ in range(count)]),
    )

    def map_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            "weight": torch.stack([state[f"heads.{i}.weight"] for i in range(count)]),
            "bias": torch.stack([state[f"heads.{i}.bias"] for i in range(count)]),
        }

    stacked = map_state({name: tensor.detach() for name, tensor in before.named_parameters()})
    after = Lambda(
        lambda m, x: torch.einsum("nij,bj->bni", m.weight, x) + m.bias,
        **{name: nn.Parameter(tensor) for name, tensor in stacked.items()},
    )
    return before, after, map_state


# -- wrong rewrites ----------------------------------------------------------------------------------------------------

WRONG = {
    "swapped sub": (lambda m, x: m.b - x, lambda m, x: x - m.b, "output differs"),
    "swapped div": (lambda m, x: m.b / (x.abs() + 1), lambda m, x: (x.abs() + 1) / m.b, "output"),
    "swapped matmul": (lambda m, x: x[:, :3] @ m.s, lambda m, x: (m.s @ x[:, :3].mT).mT, "output differs"),
    "softmax dim": (lambda m, x: x.softmax(-1), lambda m, x: x.softmax(-2), "output differs"),
    "sum dim": (lambda m, x: x[..., :3].sum(-1), lambda m, x: x[..., :3].sum(-2), "output differs"),
    "cat dim": (lambda m, x: torch.cat([x, x], 0), lambda m, x: torch.cat([x, x], 1), "shape"),
    "dropped user": (lambda m, x: F.linear(x, m.w, m.b) + x[..., :5], lambda m, x: F.linear(x, m.w, m.b), "output"),
    "dropped bias": (lambda m, x: F.linear(x, m.w, m.zero), lambda m, x: F.linear(x, m.w), ""),
    "lost gradient": (
        lambda m, x: x.tanh() * m.six, lambda m, x: x.detach().tanh() * m.six, "gradient of input[0] is lost",
    ),
    "half a gradient": (
        lambda m, x: x + x.tanh(), lambda m, x: x + x.detach().tanh(), "gradient of input[0] differs",
    ),
    "epsilon": (
        lambda m, x: F.layer_norm(x, (6,), eps=1e-6), lambda m, x: F.layer_norm(x, (6,), eps=1.1e-6), "differs",
    ),
    "rms epsilon": (
        lambda m, x: F.rms_norm(x, (6,), eps=1e-6), lambda m, x: F.rms_norm(x, (6,), eps=1.1e-6), "differs",
    ),
    "approximation": (lambda m, x: F.gelu(x), lambda m, x: F.gelu(x, approximate="tanh"), "output differs"),
    "structure": (lambda m, x: (x, x + 1), lambda m, x: [x, x + 1], "output structure changed"),
    "one output less": (lambda m, x: (x, x + 1), lambda m, x: (x,), "output structure changed"),
    "keys swapped": (lambda m, x: {"a": x, "b": -x}, lambda m, x: {"a": -x, "b": x}, "output['a'] differs"),
    "dtype": (lambda m, x: x.float(), lambda m, x: x.double(), "dtype from float32 to float64"),
    "none": (lambda m, x: (x, None), lambda m, x: (x, x), "output structure changed"),
    "raises": (lambda m, x: x, lambda m, x: x.nonsense(), "the rewritten module raises AttributeError"),
    "not a number": (lambda m, x: x.clamp(min=0), lambda m, x: x.sqrt() ** 2, "nan"),
    "in place": (lambda m, x: x + 1, lambda m, x: x.add_(1), "input[0] is now changed in place"),
    "no longer in place": (lambda m, x: x.add_(1), lambda m, x: x + 1, "input[0] is no longer changed in place"),
    "value": (lambda m, x: (x, 3), lambda m, x: (x, 4), "output[1] changed from 3 to 4"),
    "number": (lambda m, x: (x, x.sum().item()), lambda m, x: (x, x.mean().item()), "output[1] differs"),
    "integers": (lambda m, x: x.argmax(-1), lambda m, x: x.argmin(-1), "output differs at"),
    "small slice": (
        lambda m, x: torch.cat([1e4 * x, 1e-4 * x]), lambda m, x: torch.cat([1e4 * x, 1.001e-4 * x]), "output differs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_rewrites_are_named(name: str, dtype: torch.dtype) -> None:
    right, wrong, reason = WRONG[name]
    members = {
        "w": nn.Parameter(normal(5, 6)), "b": nn.Parameter(normal(6)), "zero": nn.Parameter(torch.zeros(5)),
        "s": nn.Parameter(normal(3, 3)), "six": nn.Parameter(normal(6)),
    }  # fmt: skip
    if name == "dropped user":
        members["b"] = nn.Parameter(normal(5))
    module = Lambda(right, **members).to(dtype)
    x = normal(3, 6, dtype=dtype)
    verdict = judge(module, rewritten(module, wrong), x)
    assert not verdict.ok
    assert reason in verdict.reason
    assert judge(module, copy.deepcopy(module), x).ok


@pytest.mark.parametrize("example", [torch.zeros(3, 6), torch.ones(3, 6), torch.full((3, 6), 0.5)])
def test_noise_finds_what_dull_inputs_hide(example: Tensor) -> None:
    module = Lambda(lambda m, x: x.softmax(-1))
    wrong = rewritten(module, lambda m, x: x.softmax(-2) * (3 / 6))
    verdict = judge(module, wrong, example, gradients=False)
    assert "with noise" in verdict.reason


def test_equal_members_in_the_wrong_order_are_found() -> None:
    """Members that start out equal can be exchanged without a trace, until one of them is trained."""
    before, after, map_state = ensemble_and_fused(3)
    with torch.no_grad():
        for head in before.heads:
            head.weight.copy_(before.heads[0].weight)
            head.bias.zero_()
        after.weight.copy_(before.heads[0].weight.expand(3, -1, -1))
        after.bias.zero_()
    good = judge(before, after, normal(3, 4), map_state=map_state, gradients=False)
    after.function = lambda m, x: (torch.einsum("nij,bj->bni", m.weight, x) + m.bias)[:, [1, 0, 2]]
    assert good.ok, good.reason
    bad = judge(before, after, normal(3, 4), map_state=map_state, gradients=False)
    assert "parameters with noise" in bad.reason


def test_a_state_map_that_disagrees_with_the_module_is_found() -> None:
    before, after, map_state = ensemble_and_fused(3)
    with torch.no_grad():
        after.weight.copy_(after.weight.flip(0))
    verdict = judge(before, after, normal(3, 4), map_state=map_state)
    assert verdict.reason == "weight does not have the values of the original tensors"


@dataclass(frozen=True)
class BackInAnotherOrder(Stack):
    def backward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return super().backward(tensors)[::-1]


def test_a_state_map_that_does_not_lead_back_is_found() -> None:
    """Checkpoints would be written wrong, though the model runs right."""
    before, after, _ = ensemble_and_fused(3)
    for step, ok in ((Stack, True), (BackInAnotherOrder, False)):
        olds = {name: tuple(f"heads.{i}.{name}" for i in range(3)) for name in ("weight", "bias")}
        steps = StateMap((Stack(olds["weight"], "weight"), step(olds["bias"], "bias")))
        verdict = judge(before, after, normal(3, 4), map_state=steps.forward)
        assert verdict.ok is ok
        assert ok or "heads.0.bias is not bitwise the same" in verdict.reason


def test_a_constant_that_is_written_to_is_found() -> None:
    """The first call is right, and no later one."""

    def counted(m: nn.Module, x: Tensor) -> Tensor:
        counter = getattr(m, "counter", None)
        return x + (torch.zeros(3) if counter is None else counter).add_(1)

    before, after = Lambda(counted), Lambda(counted)
    vars(after)["counter"] = torch.zeros(3)
    assert judge(before, before, normal(2, 3)).ok
    assert "counter is written to" in judge(before, after, normal(2, 3)).reason


@pytest.mark.parametrize("first", range(5))
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_wrong_at_each_fifth_call_is_not_taken_for_rounding(dtype: torch.dtype, first: int) -> None:
    calls = itertools.count(first)
    before = nn.Linear(6, 3).to(dtype)
    after = Lambda(lambda m, x: F.linear(x, m.weight, m.bias) + (0.0 if next(calls) % 5 else 0.5))
    after.weight, after.bias = before.weight, before.bias
    assert "differs" in judge(before, after, normal(4, 6, dtype=dtype)).reason


@pytest.mark.parametrize(
    ("before", "after", "owner"),
    [
        (lambda m, x: m.offset * 1, lambda m, x: m.offset, "the module's own tensors"),
        (lambda m, x: torch.zeros(3), lambda m, x: m.constant, "the module's own tensors"),
        (lambda m, x: x.clone(), lambda m, x: x.view_as(x), "input[0]"),
        (lambda m, x: (x.sin(), x.sin()), lambda m, x: (x.sin(),) * 2, "output[0]"),
    ],
)
def test_outputs_in_memory_that_is_not_the_callers_are_found(
    before: Callable[..., Any], after: Callable[..., Any], owner: str
) -> None:
    module = Lambda(before, offset=normal(3))
    other = rewritten(module, after)
    vars(other)["constant"] = torch.zeros(3)
    assert f"shares memory with {owner}" in judge(module, other, normal(3)).reason
    assert judge(other, copy.deepcopy(other), normal(3)).ok


def test_a_tensor_that_is_gone_is_found() -> None:
    before = nn.Linear(3, 3)
    after = Lambda(lambda m, x: x @ m.weight.T, weight=before.weight)
    assert judge(before, after, normal(2, 3)).reason == "bias is missing, but the state map produces it"


def test_members_of_which_only_some_get_a_gradient_cannot_be_stacked() -> None:
    before, after, map_state = ensemble_and_fused(3)
    before.function = lambda m, x: torch.stack([m.heads[0](x), m.heads[1](x), m.heads[2](x).detach()], 1)
    assert "joins tensors that receive a gradient" in judge(before, after, normal(3, 4), map_state=map_state).reason


def test_members_without_any_gradient_are_stacked() -> None:
    before, after, map_state = ensemble_and_fused(3)
    for parameter in (*before.parameters(), *after.parameters()):
        parameter.requires_grad_(False)
    verdict = judge(before, after, normal(3, 4), map_state=map_state)
    assert verdict.ok, verdict.reason


def test_a_gradient_lost_in_one_parameter_is_named() -> None:
    before = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    after = copy.deepcopy(before)
    after[0].weight.requires_grad_(False)
    assert judge(before, after, normal(3, 4)).reason == "gradient of 0.weight is lost"


@pytest.mark.parametrize("epsilon", [1.1e-6, 1e-6])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_epsilon_of_a_batch_norm(dtype: torch.dtype, training: bool, epsilon: float) -> None:
    before = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, eps=1e-6), nn.ReLU()).to(dtype)
    after = copy.deepcopy(before)
    after[1].eps = epsilon
    verdict = judge(before, after, normal(8, 4, dtype=dtype), training=training)
    assert verdict.ok is (epsilon == 1e-6), verdict.reason


def test_a_stale_buffer_is_found() -> None:
    before = nn.BatchNorm1d(4)
    after = copy.deepcopy(before)
    after.momentum = 0.0
    verdict = judge(before, after, normal(8, 4))
    assert verdict.reason.startswith("buffer running_mean is stale: differs")
    assert judge(before, after, normal(8, 4), training=False).ok


def test_integer_buffers_count() -> None:
    def count(module: Any, x: Tensor) -> Tensor:
        module.steps += 1
        return x

    before = Lambda(count, steps=torch.tensor(0))
    assert judge(before, copy.deepcopy(before), normal(3)).ok
    verdict = judge(before, rewritten(before, lambda m, x: x + 0), normal(3))
    assert verdict.reason.startswith("buffer steps is stale")


# -- what is rounded, decided or overflows -----------------------------------------------------------------------------


def test_errors_are_told_of_good_and_bad_rewrites() -> None:
    before = Lambda(lambda m, x: x.tanh() @ m.w, w=nn.Parameter(normal(32, 32)))
    x = normal(8, 32)
    good = judge(before, rewritten(before, lambda m, x: (m.w.T @ x.tanh().T).T), x)
    bad = judge(before, rewritten(before, lambda m, x: x.tanh() @ m.w * 1.001), x)
    assert 0 <= good.meaning_error < 1e-14  # 0 where a CPU adds up in the same order
    assert 0 <= good.precision_error < 1e-5
    assert bad.meaning_error == pytest.approx(1e-3, rel=1e-6)
    assert bad.checked_in == "float64"


def test_needless_loss_of_precision_is_found() -> None:
    """In float64 both are the same; natively one of them goes through 8 bits."""
    before = Lambda(lambda m, x: (x @ m.w).tanh(), w=nn.Parameter(normal(32, 32)))
    after = rewritten(before, lambda m, x: (x.bfloat16() @ m.w.bfloat16()).float().tanh())
    verdict = judge(before, after, normal(8, 32))
    assert "in its own types" in verdict.reason
    assert judge(after, before, normal(8, 32)).ok


def test_cancellation_is_found() -> None:
    before = Lambda(lambda m, x: torch.expm1(x * 1e-4))
    after = rewritten(before, lambda m, x: torch.exp(x * 1e-4) - 1)
    assert "in its own types" in judge(before, after, normal(8, 32)).reason


@pytest.mark.parametrize("seed", range(8))
def test_decisions_may_flip_where_rounding_flips_them(seed: int) -> None:
    """A bfloat16 argmax over many close values comes out otherwise under any rounding."""
    torch.manual_seed(seed)
    before = Lambda(lambda m, x: (x @ m.w).argmax(-1), w=normal(64, 1000)).to(torch.bfloat16)
    after = rewritten(before, lambda m, x: (x[:, :32] @ m.w[:32] + x[:, 32:] @ m.w[32:]).argmax(-1))
    verdict = judge(before, after, normal(64, 64, dtype=torch.bfloat16))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("seed", range(8))
def test_routing_may_flip_where_rounding_flips_it(seed: int) -> None:
    torch.manual_seed(seed)

    def route(scores: Tensor, m: Any, x: Tensor) -> Tensor:
        weight, expert = scores.softmax(-1).topk(2)
        return (m.experts[expert] * x[:, None] * weight[..., None]).sum(1)

    before = Lambda(lambda m, x: route(x @ m.gate, m, x), gate=normal(32, 16), experts=normal(16, 32))
    before = before.to(torch.bfloat16)
    after = rewritten(before, lambda m, x: route(x[:, :16] @ m.gate[:16] + x[:, 16:] @ m.gate[16:], m, x))
    x = normal(64, 32, dtype=torch.bfloat16)
    verdict = judge(before, after, x)
    assert verdict.ok, verdict.reason
    wrong = rewritten(before, lambda m, x: route(x @ m.gate + 0.001 * x[:, :16], m, x))
    assert not judge(before, wrong, x).ok


class LinearByHand(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        half = self.in_features // 2
        return x[:, :half] @ self.weight[:, :half].T + x[:, half:] @ self.weight[:, half:].T + self.bias


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(
    ("activation", "depth", "gain"), [(nn.ReLU, 2, 1.0), (nn.ReLU, 10, 1.5), (nn.Tanh, 30, 3.0), (nn.GELU, 30, 2.0)]
)
def test_kinks_and_chaos_are_no_mistakes(
    activation: type[nn.Module], depth: int, gain: float, dtype: torch.dtype, seed: int
) -> None:
    """Rounding puts a ReLU on its other side, and a deep network with large weights anywhere."""
    torch.manual_seed(seed)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(16, 16), activation())]
    before = nn.Sequential(*layers).to(dtype)
    for layer in before[::2]:
        nn.init.normal_(layer.weight, std=gain / 4)
    after = copy.deepcopy(before)
    for layer in after[::2]:
        layer.__class__ = LinearByHand
    x = normal(16, 16, dtype=dtype)
    verdict = judge(before, after, x)
    assert verdict.ok, verdict.reason
    after[-2].forward = lambda x: F.linear(x, after[-2].weight * (1 + 1e-7), after[-2].bias)
    assert not judge(before, after, x).ok


def test_one_kink_among_many_places_is_no_mistake() -> None:
    """Of 64 rows one is close to a ReLU's kink: little noise leaves it there, but one rounding does not."""
    torch.manual_seed(0)
    x, w = normal(64, 256), normal(256)
    sums = (x * w).sum(-1)
    lost = sums - (sums + 1024.0 - 1024.0)
    row = int(lost.argmax())
    start = sums - 5.0
    start[row] = sums[row] - 0.7 * lost[row]
    before = Lambda(lambda m, x: torch.relu((x * m.w).sum(-1) - m.start), w=w, start=start)
    after = rewritten(before, lambda m, x: torch.relu((x * m.w).sum(-1) + 1024.0 - 1024.0 - m.start))
    gone = [bool(model(x)[row] == 0) for model in (before, after)]
    assert gone == [False, True]
    verdict = judge(before, after, x)
    assert verdict.ok, verdict.reason
    assert verdict.precision_error > 1e-3
    wrong = rewritten(before, lambda m, x: torch.relu((x * m.w).sum(-1) * (1 + 1e-7) + 1024.0 - 1024.0 - m.start))
    assert not judge(before, wrong, x).ok


def test_an_overflow_may_go_but_not_come() -> None:
    risky = Lambda(lambda m, x: (x * 300 * 300) / 300)
    safe = rewritten(risky, lambda m, x: x * 300)
    x = torch.ones(4, dtype=torch.float16) * 2
    assert judge(risky, safe, x).ok
    assert "inf" in judge(safe, risky, x).reason


def test_masks_filled_with_the_smallest_number_do_not_hide_the_rest() -> None:
    least = torch.finfo(torch.float32).min
    before = Lambda(lambda m, x: torch.cat([x, torch.full_like(x, least)]))
    assert judge(before, copy.deepcopy(before), normal(4, 4)).ok
    wrong = rewritten(before, lambda m, x: torch.cat([1.001 * x, torch.full_like(x, least)]))
    assert not judge(before, wrong, normal(4, 4)).ok


# -- promises ----------------------------------------------------------------------------------------------------------


def test_exact_means_every_bit() -> None:
    before = Lambda(lambda m, x: x[0] + x[1] + x[2])
    after = rewritten(before, lambda m, x: x[2] + x[1] + x[0])
    x = normal(3, 100)
    assert judge(before, after, x).ok
    assert "not bitwise the same" in judge(before, after, x, numerics=Numerics.EXACT).reason
    assert judge(before, copy.deepcopy(before), x, numerics=Numerics.EXACT).ok


def test_exact_covers_the_random_stream() -> None:
    before = Lambda(lambda m, x: x + torch.rand_like(x))
    after = rewritten(before, lambda m, x: (x + torch.rand_like(x), torch.rand(1))[0])
    x = normal(5)
    assert judge(before, copy.deepcopy(before), x, numerics=Numerics.EXACT).ok
    verdict = judge(before, after, x, numerics=Numerics.EXACT)
    assert verdict.reason == "the random stream does not advance as before"
    assert judge(before, after, x).ok


def test_approximate_answers_to_its_budget() -> None:
    before = Lambda(lambda m, x: x.tanh())
    after = rewritten(before, lambda m, x: (x.tanh() * 100).round() / 100 + 0 * x.tanh())
    x = normal(50)
    assert not judge(before, after, x).ok
    assert not judge(before, after, x, numerics=Numerics.APPROXIMATE).ok  # its gradient is gone
    assert judge(before, after, x, numerics=Numerics.APPROXIMATE, gradients=False).ok
    far = rewritten(before, lambda m, x: x.tanh() + 0.2)
    assert "differs" in judge(before, far, x, numerics=Numerics.APPROXIMATE, gradients=False).reason


def test_semantic_need_only_run_and_keep_the_form_of_its_results() -> None:
    before = nn.Linear(3, 4)
    assert judge(before, nn.Linear(3, 4), normal(2, 3), numerics=Numerics.SEMANTIC).ok
    assert judge(before, nn.Linear(3, 2), normal(2, 3), numerics=Numerics.SEMANTIC, keeps_form=False).ok
    assert "changed its shape" in judge(before, nn.Linear(3, 2), normal(2, 3), numerics=Numerics.SEMANTIC).reason
    assert "raises" in judge(before, nn.Linear(5, 2), normal(2, 3), numerics=Numerics.SEMANTIC).reason


# -- state that is new, folded or tied ---------------------------------------------------------------------------------


def test_a_folded_constant_is_checked_with_noise_on_the_inputs_only() -> None:
    before = Lambda(lambda m, x: x * (m.scale + 1).sqrt(), scale=torch.rand(4))
    after = Lambda(lambda m, x: x * m.folded, scale=before.scale, folded=(before.scale + 1).sqrt())
    verdict = judge(before, after, torch.zeros(3, 4))
    assert verdict.ok, verdict.reason
    wrong = Lambda(lambda m, x: x * m.folded, scale=before.scale, folded=(before.scale + 1))
    assert "output differs" in judge(before, wrong, torch.zeros(3, 4), gradients=False).reason


def test_a_constant_folded_in_the_modules_own_types() -> None:
    before = Lambda(lambda m, x: x * torch.linspace(0, 1, 4).cos() @ m.w, w=nn.Parameter(normal(4, 4)))
    after = rewritten(before, lambda m, x: x * m.constant @ m.w)
    after.constant = torch.linspace(0, 1, 4).cos()
    for numerics in (Numerics.EXACT, Numerics.REASSOCIATED):
        verdict = judge(before, after, normal(3, 4), numerics=numerics)
        assert verdict.ok, verdict.reason
    after.constant += 1e-4
    assert not judge(before, after, normal(3, 4)).ok


def test_tied_parameters() -> None:
    before = Lambda(lambda m, x: m.decode(m.encode(x)), encode=nn.Linear(4, 4), decode=nn.Linear(4, 4))
    before.decode.weight = before.encode.weight
    after = copy.deepcopy(before)
    assert judge(before, after, normal(3, 4)).ok
    after.decode.weight = nn.Parameter(after.encode.weight.detach().clone())
    assert "gradient of encode.weight differs" in judge(before, after, normal(3, 4)).reason


@pytest.mark.parametrize("gradients", [False, True])
def test_parameters_may_be_results(gradients: bool) -> None:
    module = Lambda(lambda m, x: (x * m.weight, m.weight), weight=nn.Parameter(normal(3)))
    assert judge(module, copy.deepcopy(module), normal(2, 3), gradients=gradients).ok
    wrong = rewritten(module, lambda m, x: (x * m.weight, m.weight + 1))
    assert not judge(module, wrong, normal(2, 3), gradients=gradients).ok


# -- leaving no trace --------------------------------------------------------------------------------------------------


class Busy(nn.Module):
    """Change everything that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.history: list[Tensor] = []
        self.register_buffer("last", torch.zeros(4))
        self.plain = torch.ones(4)
        self.rnn = nn.GRU(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(x)
        self.last = x.mean(0)
        self.plain.add_(1)
        return self.rnn(F.dropout(self.norm(x), 0.5, self.training))[0] * self.plain


def test_nothing_is_left_behind() -> None:
    module = Busy()
    module.norm.eval()
    sum(p.sum() for p in module.parameters()).backward()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    gradients = {name: (id(p.grad), p.grad.clone()) for name, p in module.named_parameters()}
    parameters = {name: id(p) for name, p in module.named_parameters()}
    x = normal(6, 4)
    generator = torch.get_rng_state()
    kept = x.clone()
    verdict = judge(module, module, x, training=False)
    assert verdict.ok, verdict.reason
    assert torch.equal(torch.get_rng_state(), generator)
    assert (module.calls, module.history, module.training, module.norm.training) == (0, [], True, False)
    assert torch.equal(module.plain, torch.ones(4))
    assert torch.equal(x, kept)
    assert not x.requires_grad
    assert {name: id(p) for name, p in module.named_parameters()} == parameters
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert all(id(p.grad) == gradients[name][0] for name, p in module.named_parameters())
    assert all(torch.equal(p.grad, gradients[name][1]) for name, p in module.named_parameters())
    assert torch.get_default_dtype() is torch.float32


def test_nothing_is_left_behind_by_a_module_that_raises() -> None:
    module = Lambda(lambda m, x: m.linear(x) + m.nothing, linear=nn.Linear(2, 2))
    weight = module.linear.weight
    with pytest.raises(InputError, match="Lambda raised AttributeError"):
        reference(module, [Call((normal(3, 2),))])
    assert module.linear.weight is weight
    assert torch.get_default_dtype() is torch.float32


def test_flags_stay_as_they_are_in_a_model_half_in_training() -> None:
    seen: list[tuple[bool, bool]] = []
    module = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4))
    module[1].eval()
    module[1].register_forward_pre_hook(lambda m, _: seen.append((module.training, m.training)))
    for training in (None, True):
        assert judge(module, module, normal(6, 4), training=training).ok
    assert set(seen) == {(True, False)}
    assert judge(module, module, normal(6, 4), training=False).ok
    assert (False, False) in seen


def test_no_calls_say_so() -> None:
    module = nn.Linear(2, 2)
    verdict = verify(reference(module, []), module)
    assert (verdict.ok, verdict.checked_in) == (True, "nothing: there was no call to run")


# -- what modules take and give ----------------------------------------------------------------------------------------


def test_arguments_in_any_form() -> None:
    class Bag:
        def __init__(self, x: Tensor) -> None:
            self.x, self.name = x, "bag"

    def run(m: Any, pair: tuple[Tensor, Tensor], *, bag: Bag, table: dict[str, list[Tensor]], flag: bool) -> Tensor:
        return pair[0] @ m.w + pair[1] * bag.x + table["a"][0] * flag

    module = Lambda(run, w=nn.Parameter(normal(4, 4)))
    kwargs = {"bag": Bag(normal(4)), "table": {"a": [normal(4)]}, "flag": True}
    x = normal(3, 4)
    assert judge(module, copy.deepcopy(module), (x, x), **kwargs).ok
    wrong = rewritten(
        module, lambda m, pair, bag, table, flag: pair[0] @ m.w + pair[1] * bag.x.detach() + table["a"][0]
    )
    assert judge(module, wrong, (x, x), **kwargs).reason == "gradient of input['bag'].x is lost"


def test_operators_without_float64_are_checked_in_float32() -> None:
    def only_float32(m: Any, x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise NotImplementedError("\"kernel\" not implemented for 'Double'")
        return x.tanh() * m.w

    module = Lambda(only_float32, w=nn.Parameter(normal(4)))
    verdict = judge(module, rewritten(module, lambda m, x: m.w * x.tanh()), normal(3, 4))
    assert (verdict.ok, verdict.checked_in) == (True, "float32"), verdict.reason
    verdict = judge(module, rewritten(module, lambda m, x: m.w * x.tanh() * 1.001), normal(3, 4))
    assert "float32" in verdict.reason
    # The same where only the rewritten code lacks float64.
    plain = rewritten(module, lambda m, x: m.w * x.tanh())
    verdict = judge(plain, module, normal(3, 4))
    assert (verdict.ok, verdict.checked_in) == (True, "float32"), verdict.reason


def test_complex_numbers() -> None:
    module = Lambda(lambda m, x: torch.fft.rfft(x) * m.w, w=nn.Parameter(torch.randn(5, dtype=torch.complex64)))
    x = normal(3, 8)
    assert judge(module, copy.deepcopy(module), x).ok
    assert not judge(module, rewritten(module, lambda m, x: torch.fft.rfft(x).conj() * m.w), x).ok


def test_sparse_gradients() -> None:
    module = nn.Embedding(10, 4, sparse=True)
    other = nn.Embedding(10, 4)
    other.weight = module.weight
    x = torch.tensor([1, 2, 2])
    assert judge(module, copy.deepcopy(module), x).ok
    assert judge(other, copy.deepcopy(other), x).ok


@pytest.mark.parametrize(("off_at", "found"), [(64, "bitwise"), (1000, "")])
def test_of_a_smaller_call_the_recorded_one_is_asked_for_the_same_bits(off_at: int, found: str) -> None:
    call, seen = Call((torch.randn(1, 64, 4),)), list[tuple[int, ...]]()

    def watched(self: nn.Module, x: Tensor) -> Tensor:
        seen.append((*x.shape, x.element_size()))
        return x * 3.0

    def other(self: nn.Module, x: Tensor) -> Tensor:
        return x * 3.0 if x.shape[1] < off_at else x * 3.0 + 1e-7

    known = reference(Lambda(watched), [call], gradients=False, sizes=Sizes.SMALLER_AND_RECORDED)
    assert {(64, 4, 4)} == {each[1:] for each in seen if each[1] == 64}  # in float64 no call is as long
    verdict = verify(known, Lambda(other), numerics=Numerics.EXACT)
    assert verdict.ok is not bool(found) and found in verdict.reason
