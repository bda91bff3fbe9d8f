"""Lossy passes keep their contract: a budget for each site and for the whole model, or a reference and its state."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.passes import timing
from fxopt.passes.contract import Pass
from fxopt.passes.rewriting import Edit, module
from fxopt.passes.sites import Goal, Numerics, Phase, Refusal, Site
from fxopt.passes.timing import Timings
from fxopt.runtime.state import Select, StateStep
from fxopt.tracing.program import Program

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def decisions(model: nn.Module) -> list[tuple[str, str]]:
    return [(decision.status, decision.reason) for decision in fxopt.plan(model).decisions]


def error(fast: nn.Module, model: nn.Module) -> float:
    with torch.no_grad():
        return float((fast(X) - model(X)).abs().max() / model(X).abs().max())


@dataclasses.dataclass(frozen=True)
class OfLinears(Pass):
    """Find linear layers, those with some numbers or all."""

    budget: float = 0.05
    numbers: tuple[int, ...] = ()

    goal: ClassVar[Goal] = Goal.SIZE
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for number, match in enumerate(program.matches(module(nn.Linear, name="linear"))):
            if not self.numbers or number in self.numbers:
                yield match.site()


def narrow_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16()).to(x.dtype)


def narrow_result(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16())


def larger_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias) * 1.04


FUNCTIONS = {"narrow": narrow_linear, "result": narrow_result, "larger": larger_linear}


@dataclasses.dataclass(frozen=True)
class Linears(OfLinears):
    """Compute linear layers by another function of input, weight and bias."""

    function: str = "narrow"

    phase: ClassVar[Phase] = Phase.BOTH

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("linear")
        tensors = [edit.get_attr(f"{node.target}.{name}", before=node) for name in ("weight", "bias")]
        edit.replace(node, edit.call(FUNCTIONS[self.function], node.args[0], *tensors))


def chain(length: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(length)))


@pytest.mark.parametrize("training", [True, False])
def test_the_budget_is_the_option_of_the_pass(training: bool) -> None:
    model = chain(1).train(training)
    ((status, _),) = decisions(fxopt.optimize(model, [Linears(0.05)], example_inputs=(X,)))
    assert status == "applied"
    for budget in (1e-9, 1e-4):
        ((status, reason),) = decisions(fxopt.optimize(model, [Linears(budget)], example_inputs=(X,)))
        assert status == "undone" and "relative to its scale" in reason


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan"), float("inf"), 2.0, "much", True])
def test_a_budget_that_is_none_is_refused_before_the_work(budget: Any) -> None:
    with pytest.raises(fxopt.UsageError, match=r"pass 'linears': budget=.*; give a relative error"):
        fxopt.optimize(chain(1), [Linears(budget)], example_inputs=(X,))


def test_the_type_of_results_is_kept() -> None:
    fast = fxopt.optimize(chain(1), [Linears(function="result")], example_inputs=(X,))
    ((status, reason),) = decisions(fast)
    assert (status, reason) == ("undone", "output changed its dtype from float32 to bfloat16")


def test_the_budget_holds_for_the_whole_model_too() -> None:
    model = chain(8).eval().requires_grad_(False)
    for linear in model:
        nn.init.zeros_(linear.bias)  # so that the errors of all layers multiply
    fast = fxopt.optimize(model, [Linears(0.05, function="larger")], example_inputs=(X,))
    found = decisions(fast)
    assert error(fast, model) <= 0.05
    assert [status for status, _ in found].count("applied") == 1
    assert all(
        "the model as handed over is over the budget of" in reason for status, reason in found if status == "undone"
    )
    wide = fxopt.optimize(model, [Linears(0.5, function="larger")], example_inputs=(X,))
    assert {status for status, _ in decisions(wide)} == {"applied"}


@dataclasses.dataclass(frozen=True)
class FastLinears(Linears):
    """The same for speed."""

    goal: ClassVar[Goal] = Goal.SPEED


@pytest.mark.parametrize(("speed", "status"), [(1.5, "applied"), (0.5, "undone")])
def test_what_is_left_after_the_budget_of_the_whole_model_is_timed_again(
    monkeypatch: pytest.MonkeyPatch, speed: float, status: str
) -> None:
    """Sites are twice as fast, and so is the model with all of them; with those that its budget allows it is not."""
    wholes = list[float]()

    def timed(candidates: Any, **_: Any) -> Timings:
        whole = "after" in candidates and len(getattr(candidates["before"].module, "_modules", {})) == 8
        if whole:
            wholes.append(speed if wholes else 2.0)
        before = wholes[-1] if whole else 2.0
        return Timings([{name: before if name == "before" else 1.0 for name in candidates}] * 9)

    monkeypatch.setattr(timing, "time_candidates", timed)
    fast = fxopt.optimize(chain(8), FastLinears(budget=0.05, function="larger"), example_inputs=(X,), time_budget=2)
    found = [found for found, _ in decisions(fast)]
    assert wholes[:2] == [2.0, speed]
    assert set(found) == ({"applied", "undone"} if status == "applied" else {"undone"})
    assert (fxopt.report(fast).to_json()["timings"] is None) == (status == "undone")


def test_budgets_of_several_passes_add_up() -> None:
    model = chain(2)
    passes = [Linears(0.05, (0,), "larger"), Linears(0.049, (0,), "larger")]
    fast = fxopt.optimize(model, passes, example_inputs=(X,))
    assert {status for status, _ in decisions(fast)} == {"applied"}
    assert 0.05 < error(fast, model) <= 0.1


class Attention(nn.Module):
    """Has a gradient that is zero in exact arithmetic: that of the key's bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        return scores.softmax(-1) @ self.value(x)


def test_a_gradient_that_is_zero_in_theory_is_judged_beside_its_neighbours() -> None:
    fast = fxopt.optimize(Attention().train(), [Linears(0.05)], example_inputs=(X,))
    assert {status for status, _ in decisions(fast)} == {"applied"}
    fast(X).sum().backward()
    assert fast.key.bias.grad is not None


class Bend(nn.Module):
    """A ReLU whose input is so near zero that rounding in 16 bits puts it on the other side."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        with torch.no_grad():
            self.linear.bias -= self.linear(X)[0] - 1e-4

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.linear(x).relu())


def steeper_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = narrow_linear(x, weight, bias)
    return y.detach() + 1.3 * (y - y.detach())


FUNCTIONS["steeper"] = steeper_linear


def test_gradients_may_jump_where_those_of_the_original_do_and_not_elsewhere() -> None:
    model = Bend()
    fast = fxopt.optimize(model, [Linears(0.05)], example_inputs=(X,))
    gradients: list[Tensor] = []
    for each in (model, fast):
        each(X).sin().sum().backward()
        gradients.append(each.linear.bias.grad)
    assert (gradients[0] - gradients[1]).abs().max() > 0.06 * gradients[0].abs().max()
    assert {status for status, _ in decisions(fast)} == {"applied"}
    steeper = fxopt.optimize(chain(2), [Linears(0.05, function="steeper")], example_inputs=(X,))
    assert all(status == "undone" and "gradient of" in reason for status, reason in decisions(steeper))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def test_equal_blocks_follow_the_first_within_their_own_budget() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(3)))
    fast = fxopt.optimize(model, [Linears(0.05)], example_inputs=(X,), measure=False)
    made = fxopt.plan(fast).decisions
    assert [(each.status, each.figures.get("as")) for each in made] == [("applied", n) for n in (None, "0", "0")]
    assert len({each.figures["precision_error"] for each in made}) == 3


# -- state: integers in the place of floats ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Quantize(StateStep):
    """Keep a weight [out, in] as integers [out, in] and scales [out, 1]."""

    old: str
    new: str

    kind: ClassVar[str] = "test_quantize"

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.old,)

    @property
    def targets(self) -> tuple[str, ...]:
        return f"{self.new}.integers", f"{self.new}.scales"

    def forward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (weight,) = tensors
        scales = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        return (weight / scales).round().to(torch.int8), scales

    def backward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        integers, scales = tensors
        return (integers.to(scales.dtype) * scales,)


class IntegerLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        integers, scales = Quantize("", "").forward([linear.weight.detach()])
        self.register_buffer("integers", integers)
        self.register_buffer("scales", scales)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.integers.to(x.dtype) * self.scales, self.bias)


@dataclasses.dataclass(frozen=True)
class Integers(OfLinears):
    """Put linear layers with integer weights beside the old ones."""

    tells: bool = True

    phase: ClassVar[Phase] = Phase.EVAL

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("linear")
        name, old = str(node.target), edit.owner.get_submodule(str(node.target))
        edit.remove_module(name)
        new = edit.add_module(IntegerLinear(old), name=name)
        if self.tells:
            edit.record_state(Quantize(f"{name}.weight", new))


def quiet(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fxopt.optimize(model, *args, **kwargs)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


def test_integer_weights_come_back_from_checkpoints() -> None:
    model = Two().eval()
    fast = quiet(model, [Integers()], example_inputs=(X,))
    assert [status for status, _ in decisions(fast)] == ["applied", "applied"]
    assert fast.first.integers.dtype is torch.int8 and 0 < error(fast, model) < 0.05


def test_state_that_does_not_come_back_is_refused() -> None:
    fast = quiet(Two().eval(), [Integers(tells=False)], example_inputs=(X,))
    assert {status for status, _ in decisions(fast)} == {"refused"}
    assert all("state" in reason for _, reason in decisions(fast)), decisions(fast)


# -- another function, by design -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Prune(Pass):
    """Remove the hidden units of a `Two` that are not kept."""

    kept: tuple[int, ...] = (0, 2, 5, 7)
    really: tuple[int, ...] = ()
    tells: bool = True

    goal: ClassVar[Goal] = Goal.SIZE
    numerics: ClassVar[Numerics] = Numerics.SEMANTIC

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        yield Site(program, "", {})

    def rewrite(self, site: Site, edit: Edit) -> None:
        kept = list(self.really or self.kept)
        for name, dim in (("first", 0), ("last", 1)):
            old = edit.owner.get_submodule(name)
            sizes = (old.in_features, len(kept)) if dim == 0 else (len(kept), old.out_features)
            new = nn.Linear(*sizes)
            moved = [("weight", dim)] + ([("bias", 0)] if dim == 0 else [])
            for tensor, along in moved:
                value = getattr(old, tensor).detach().index_select(along, torch.tensor(kept))
                setattr(new, tensor, nn.Parameter(value))
            if dim == 1:
                new.bias = old.bias
            edit.remove_module(name)
            edit.add_module(new, name=name)
            for tensor, along in moved if self.tells else ():
                edit.record_state(Select(f"{name}.{tensor}", f"{name}.{tensor}", along, tuple(kept), 12))

    def reference(self, site: Site, original: nn.Module) -> nn.Module | None:
        return zeroed(original, self.kept)


def zeroed(model: nn.Module, kept: tuple[int, ...] = (0, 2, 5, 7)) -> nn.Module:
    gone = [unit for unit in range(12) if unit not in kept]
    with torch.no_grad():
        model.first.weight[gone] = 0
        model.first.bias[gone] = 0
        model.last.weight[:, gone] = 0
    return model


@pytest.mark.parametrize("training", [True, False])
def test_a_pruned_model_equals_the_original_with_zeros(training: bool) -> None:
    model = Two().train(training)
    fast = quiet(model, [Prune()], example_inputs=(X,))
    assert decisions(fast) == [("applied", "")]
    assert fast.first.weight.shape == (4, 8)
    assert fxopt.plan(fast).decisions[0].figures["checked"] == "float64"
    torch.testing.assert_close(fast(X), zeroed(Two())(X))


def test_other_units_than_those_of_the_reference_are_undone() -> None:
    fast = quiet(Two(), [Prune(really=(0, 2, 5, 8))], example_inputs=(X,))
    ((status, reason),) = decisions(fast)
    assert status == "undone" and ("differs" in reason or "does not have the values" in reason)


def test_pruning_that_does_not_say_what_becomes_of_tensors_is_refused() -> None:
    ((status, reason),) = decisions(quiet(Two(), [Prune(tells=False)], example_inputs=(X,)))
    assert status == "refused" and "state" in reason, reason


@dataclasses.dataclass(frozen=True)
class ByDesign(OfLinears):
    """Compute something else by design, and give no reference."""

    how: str = "double"

    numerics: ClassVar[Numerics] = Numerics.SEMANTIC

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("linear")
        new = edit.call(DESIGNS[self.how], node, before=node.next)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


@dataclasses.dataclass(frozen=True)
class Free(ByDesign):
    """Need not keep the form of results."""

    keeps_form: ClassVar[bool] = False


def double(x: Tensor) -> Tensor:
    return x * 2


def broken(x: Tensor) -> Tensor:
    return x.view(-1, 7777)


def half(x: Tensor) -> Tensor:
    return x[..., ::2]


DESIGNS = {"double": double, "broken": broken, "half": half}


def test_a_change_by_design_has_to_run_and_to_keep_its_form() -> None:
    assert decisions(fxopt.optimize(chain(1), [ByDesign()], example_inputs=(X,))) == [("applied", "")]
    ((status, reason),) = decisions(fxopt.optimize(chain(1), [ByDesign(how="broken")], example_inputs=(X,)))
    assert status == "undone" and "the rewritten module raises RuntimeError" in reason
    ((status, reason),) = decisions(fxopt.optimize(chain(1), [ByDesign(how="half")], example_inputs=(X,)))
    assert (status, reason) == ("undone", "output changed its shape from [6, 8] to [6, 4]")
    assert decisions(fxopt.optimize(chain(1), [Free(how="half")], example_inputs=(X,))) == [("applied", "")]
