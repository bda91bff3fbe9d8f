"""Steps in another form where all is as usual, and in torch's own where it is not: weights are the same in any case."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stepping import KINDS, Kernels
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from fxopt.passes.driver.results.gate import FLAGS, forms_of, reset_form, set_form

X = torch.linspace(-1, 1, 2 * 3 * 4 * 4).view(2, 3, 4, 4)

Changes = Callable[[nn.Module, Optimizer], object]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(36, 2))


def pair(make: Callable[[Any], Optimizer], form: str = "fused") -> list[tuple[nn.Module, Optimizer]]:
    """Return a model that is trained as torch does it, and the same one in a form."""
    pairs = [(model, make(model.parameters())) for model in (network(), network())]
    set_form(pairs[1][1], form)
    return pairs


def assert_alike(one: nn.Module, other: nn.Module, **how: float) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **{"rtol": 1e-5, "atol": 1e-6, **how})


def has_no_flags(optimizer: Optimizer) -> bool:
    return all(group[flag] is None for group in (*optimizer.param_groups, optimizer.defaults) for flag in FLAGS)


def loss(model: nn.Module) -> Tensor:
    first: Any = model.get_submodule("0")
    return (model(X.to(first.weight.dtype)) - 1).square().mean()


def backward(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    loss(model).backward()


def train(model: nn.Module, optimizer: Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        backward(model, optimizer)
        optimizer.step()


def with_gaps(tensor: Tensor) -> Tensor:
    """Return the same numbers with a stranger's between each two."""
    return torch.stack([tensor, torch.full_like(tensor, 1e3)], -1)[..., 0]


def gradients(change: Callable[[Tensor], Tensor | None], model: nn.Module, optimizer: Optimizer) -> None:
    backward(model, optimizer)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = change(parameter.grad)
    optimizer.step()


def moments_with_gaps(model: nn.Module, optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state.update({name: with_gaps(value) for name, value in state.items() if name != "step" and value is not None})


def turned(tensor: Tensor) -> Tensor:
    """Return the same numbers with the dimensions in memory the other way round."""
    order = [*reversed(range(tensor.dim()))]
    return tensor.permute(order).contiguous().permute(order)


def closure(model: nn.Module, optimizer: Optimizer) -> None:
    """A closure that sets gradients, after all hooks before a step."""

    def evaluate() -> Tensor:
        value = loss(model)
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(value, [*model.parameters()]), strict=True
        ):
            parameter.grad = turned(gradient)
        return value

    before = loss(model)
    assert torch.equal(torch.as_tensor(optimizer.step(evaluate)), before)


def hook(model: nn.Module, optimizer: Optimizer) -> None:
    def prepare(*_: object) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = turned(parameter.grad)

    optimizer.register_step_pre_hook(prepare)
    train(model, optimizer)


def memory(model: nn.Module, optimizer: Optimizer) -> None:
    """A parameter becomes a part of other memory."""
    weight = model.get_parameter("3.weight")
    weight.data = torch.zeros(2, 50)[:, :36].copy_(weight.data)


def joined(make: Callable[[], Tensor], model: nn.Module, optimizer: Optimizer) -> None:
    model.register_parameter("joined", parameter := nn.Parameter(make()))
    optimizer.add_param_group({"params": [parameter]})
    for _ in range(2):
        backward(model, optimizer)
        parameter.abs().square().sum().backward()
        optimizer.step()


def rate(model: nn.Module, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.01)


def twice(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"].append(next(model.parameters()))


def moved(model: nn.Module, optimizer: Optimizer) -> None:
    """A checkpoint of a contiguous model in one that is channels last."""
    saved = copy.deepcopy(optimizer.state_dict())
    model.to(memory_format=torch.channels_last)
    optimizer.load_state_dict(saved)


USUAL = 1
CHANGES: dict[str, tuple[Changes, int]] = {
    "columns": (functools.partial(gradients, with_gaps), USUAL),
    "expanded": (functools.partial(gradients, lambda g: g.mean().expand_as(g)), USUAL),
    "turned": (functools.partial(gradients, turned), USUAL),
    "moments": (moments_with_gaps, 0),
    "closure": (closure, USUAL),
    "hook": (hook, 0),
    "memory": (memory, 0),
    "group of columns": (functools.partial(joined, lambda: torch.ones(3, 4)[:, :2]), USUAL),
    "complex group": (functools.partial(joined, lambda: torch.ones(3, dtype=torch.complex64)), USUAL),
    "empty group": (functools.partial(joined, lambda: torch.ones(0, 3)), USUAL),
    "rate": (rate, 0),
    "twice": (twice, 0),
    "format": (moved, 0),
    "late gradients": (functools.partial(gradients, lambda g: g if g.dim() > 1 else None), USUAL),
}
"""Changes, and whether steps after them are fused again."""


@pytest.mark.filterwarnings("ignore:optimizer contains")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("kind", "form"), [*((kind, "fused") for kind in KINDS), ("adamw", "foreach")])
def test_what_is_unusual_is_done_as_without_a_form(kind: str, change: str, form: str) -> None:
    act, usual = CHANGES[change]
    (plain, expected), (model, optimizer) = pair(KINDS[kind], form)
    with Kernels() as before:
        train(model, optimizer)
    train(plain, expected)
    for each, its in ((plain, expected), (model, optimizer)):
        act(each, its)
    with Kernels() as after:
        train(model, optimizer)
    train(plain, expected)
    assert_alike(model, plain)
    assert has_no_flags(optimizer)
    if form == "fused":
        assert before.count
        assert bool(after.count) == bool(usual)


@pytest.mark.filterwarnings("ignore:Sparse invariant")
@pytest.mark.parametrize("kind", ["dampened", "adagrad"])
def test_gradients_that_become_sparse(kind: str) -> None:
    (plain, expected), (model, optimizer) = pair(KINDS[kind])
    for each, its in ((plain, expected), (model, optimizer)):
        train(each, its)
        backward(each, its)
        weight = each.get_parameter("3.weight")
        assert weight.grad is not None
        weight.grad = weight.grad.to_sparse()
        its.step()
        train(each, its)
    assert_alike(model, plain)


@pytest.mark.parametrize("kind", ["adamw", "adagrad"])
def test_a_model_that_is_channels_last_takes_fused_steps(kind: str) -> None:
    model = network().to(memory_format=torch.channels_last)
    optimizer = KINDS[kind](model.parameters())
    set_form(optimizer, "fused")
    plain = copy.deepcopy(model)
    with Kernels() as kernels:
        train(model, optimizer)
    assert kernels.count == 2
    train(plain, KINDS[kind](plain.parameters()))
    assert_alike(model, plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_in_another_precision_take_steps_as_without_a_form(dtype: torch.dtype) -> None:
    """The form was compared in another one, and moments that are there are of another kind."""
    (plain, expected), (model, optimizer) = pair(KINDS["sgd"])
    for each, its in ((plain, expected), (model, optimizer)):
        train(each, its)
        each.to(dtype)
    with Kernels() as kernels:
        train(model, optimizer)
    train(plain, expected)
    assert kernels.count == 0
    assert_alike(model, plain, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"]
)
def test_copies_have_no_form_and_the_original_keeps_it(copied: Callable[[Any], Any], kind: str) -> None:
    (plain, expected), (model, optimizer) = pair(KINDS[kind])
    train(plain, expected)
    train(model, optimizer)
    another, its = copied((model, optimizer))
    with Kernels() as kernels:
        train(another.to(memory_format=torch.channels_last), its)
    assert kernels.count == 0
    train(plain, expected)
    assert_alike(another, plain)
    assert has_no_flags(its)
    assert vars(its).keys() == vars(copied((plain, expected))[1]).keys()
    with Kernels() as kernels:
        train(model, optimizer)
    assert kernels.count == 2


@pytest.mark.parametrize("first", [True, False])
def test_a_scheduler_that_wraps_the_step_before_or_after(first: bool) -> None:
    (plain, expected), (model, optimizer) = pair(KINDS["adamw"])
    if first:
        reset_form(optimizer)
    schedulers = [ExponentialLR(each, 0.5) for each in (expected, optimizer)]
    if first:
        set_form(optimizer, "fused")
    for _ in range(2):
        with Kernels() as kernels:
            train(model, optimizer)
        assert kernels.count == 2
        train(plain, expected)
        for scheduler in schedulers:
            scheduler.step()
    assert_alike(model, plain)
    reset_form(optimizer)
    with Kernels() as kernels:
        train(model, optimizer)
    assert kernels.count == 0


def test_a_gradient_scaler_takes_the_scale_away_before_any_form_of_a_step() -> None:
    (plain, expected), (model, optimizer) = pair(KINDS["adamw"])
    for each, its in ((plain, expected), (model, optimizer)):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for change in (torch.clone, lambda g: g * torch.inf, turned, torch.clone):
            its.zero_grad()
            scaler.scale(loss(each)).backward()
            for parameter in each.parameters():
                assert parameter.grad is not None
                parameter.grad = change(parameter.grad)
            scaler.step(its)
            scaler.update()
        assert scaler.get_scale() == 2.0
    assert_alike(model, plain)


def test_flags_that_a_user_sets_later_are_his() -> None:
    model, optimizer = pair(KINDS["adamw"])[1]
    optimizer.param_groups[0]["fused"] = False
    with Kernels() as kernels:
        train(model, optimizer)
    assert kernels.count == 0
    reset_form(optimizer)
    assert optimizer.param_groups[0]["fused"] is False


def test_a_step_that_fails_leaves_nothing_in_saved_states(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = pair(KINDS["adamw"])[1]
    train(model, optimizer)
    monkeypatch.setattr(torch, "_fused_adamw_", fail)
    with pytest.raises(RuntimeError, match="lost"):
        train(model, optimizer)
    assert optimizer.state_dict()["param_groups"][0]["fused"] is None
    assert has_no_flags(optimizer)


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("lost")


def test_optimizers_that_read_no_groups_have_one_form() -> None:
    class Own(optim.Adam):
        def __getstate__(self) -> dict[str, Any]:
            return vars(self)

    model = network()
    for kind in (optim.LBFGS, optim.SparseAdam, Own):
        assert forms_of(kind(model.parameters())) == [""]


def test_a_step_that_is_compiled() -> None:
    (plain, expected), (model, optimizer) = pair(KINDS["adamw"])
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        backward(model, optimizer)
        compiled()
    train(plain, expected, 3)
    assert has_no_flags(optimizer)
    assert_alike(model, plain, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_join_a_group_or_have_gradients_late_and_not_always(kind: str) -> None:
    """Some have a state of their steps, others have none yet, in one group and at one step."""

    def made() -> tuple[list[nn.Parameter], Optimizer]:
        parameters = [nn.Parameter(torch.linspace(-1, 1, size).repeat(2, 1)) for size in (3, 5, 7)]
        return parameters, KINDS[kind](parameters)

    def steps(parameters: list[nn.Parameter], optimizer: Optimizer, closure: bool) -> None:
        def set_gradients(seed: int, trained: int) -> float:
            for place, parameter in enumerate(parameters):
                parameter.grad = torch.full_like(parameter, seed + place) if trained >> place & 1 else None
            return 0.0

        for seed, trained in enumerate((0b001, 0b010, 0b011, 0b110, 0b000, 0b111)):
            if closure:
                optimizer.step(functools.partial(set_gradients, seed, trained))
            else:
                set_gradients(seed, trained)
                optimizer.step()
        optimizer.param_groups[0]["params"].append(joined := nn.Parameter(torch.ones(4)))
        parameters.append(joined)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
            if kind == "adagrad":
                optimizer.state[parameter].setdefault("sum", torch.zeros_like(parameter))
                optimizer.state[parameter].setdefault("step", torch.tensor(0.0))
        optimizer.step()

    for closure in (False, True):
        (plain, expected), (mine, optimizer) = made(), made()
        set_form(optimizer, "fused")
        steps(plain, expected, closure)
        steps(mine, optimizer, closure)
        assert_alike(nn.ParameterList(mine), nn.ParameterList(plain))
