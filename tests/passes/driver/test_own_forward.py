"""A guard that fails after a rewrite: the own forward where it is still right, an error that names the guard else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import fxopt
from fxopt.errors import GuardError
from fxopt.passes.contract import Pass
from fxopt.passes.sites import Goal, Numerics, OwnForward, Site
from fxopt.runtime.graphs import capture_of, misses_in

X = torch.randn(4, 3, 8, 8)


class Everything(nn.Module):
    """What each pass of the preset rewrites, and a second case that the example inputs do not cover."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(8))

    def forward(self, x, flag=False):
        y = torch.relu(self.norm(self.conv(x)))
        torch.exp(y)
        y = torch.sigmoid(y) + torch.sigmoid(y)
        y = y.mean((2, 3)) * (torch.arange(6) + 1)
        outputs = [head(y) for head in self.heads]
        if flag:
            return sum(outputs) + self.norm(self.conv(x)).mean() + self.conv(x).mean()
        return torch.stack(outputs).mean(0)


def trained() -> Everything:
    model = Everything()
    model(torch.randn(16, 3, 8, 8))  # statistics that are not those of a new norm
    return model.eval()


PRESET = [
    "eliminate_common_subexpressions",
    "fold_constants",
    "eliminate_dead_code",
    "fold_batchnorm",
    "fuse_ensembles",
    "inference",
]


@pytest.mark.parametrize("name", PRESET)
def test_each_pass_of_the_preset(name):
    plain = trained()
    fast = fxopt.optimize(plain, name, example_inputs=(X,), measure=False)
    assert [d for d in fxopt.plan(fast).decisions if d.status == "applied"]
    for weights in (plain.state_dict(), trained().state_dict()):
        plain.load_state_dict(weights)
        fast.load_state_dict(weights)
        for flag in (True, False, True, True):
            x, y = (X.clone().requires_grad_() for _ in range(2))
            given, expected = fast(x, flag), plain(y, flag)
            torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
            given.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)
    assert misses_in(fast.modules())[0].module == ""


def test_training_goes_on_where_a_guard_fails_in_a_fused_model():
    plain = Everything().train()
    fast = fxopt.optimize(plain, "fuse_ensembles", example_inputs=(X,), measure=False)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (plain, fast)]
    for step in range(6):
        losses: list[torch.Tensor] = []
        for model, optimizer in zip((plain, fast), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(model(X, step % 2 == 0).square().mean())
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-6)
    assert len(capture_of(fast).specializations) == 1


class Labelled(nn.Module):
    """Give logits, and with labels the loss, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3)) for _ in range(6))

    def forward(self, x, labels=None):
        logits = torch.stack([head(x) for head in self.heads]).mean(0)
        return logits if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


def test_a_model_whose_training_is_checkpointed_too_is_evaluated_without_labels():
    plain, x, labels = Labelled().train(), torch.randn(8, 64), torch.arange(8) % 3
    example = fxopt.Inputs(x, labels=labels)
    fast = fxopt.optimize(plain, ["fuse_ensembles", "checkpoint"], example_inputs=example, measure=False)
    applied = {(each.pass_name, each.label) for each in fxopt.plan(fast).decisions if each.status == "applied"}
    assert applied == {("fuse_ensembles", "heads"), ("checkpoint", "(root)")}
    for training in (False, True):
        torch.testing.assert_close(fast.train(training)(x), plain.train(training)(x))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, flag=False):
        y = torch.relu(self.linear(x))
        return y * 2 if flag else y


class Home(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Small()

    def forward(self, x, flag=False):
        return self.block(x, flag)


@dataclass(frozen=True)
class Halve(Pass):
    """Multiply by a half: another function, on purpose."""

    numerics: ClassVar[Numerics] = Numerics.SEMANTIC
    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program):
        yield Site(program, "block", {"relu": "relu"})

    def rewrite(self, site, edit):
        relu = edit.graph_node("relu")
        edit.replace(relu, edit.call(torch.mul, edit.call(torch.relu, *relu.args), 0.5))


@dataclass(frozen=True)
class Outline(Pass):
    """Put a node into a region."""

    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program):
        yield Site(program, "block", {"relu": "relu"})

    def rewrite(self, site, edit):
        edit.outline([edit.graph_node("relu")], name="region")


@pytest.mark.parametrize(
    ("pass_", "module", "why"),
    [
        (Halve(), "'block' (Small)", "pass 'halve' changed what it computes"),
        (Outline(), "'block' (Small)", "it would leave out the region 'region'"),
    ],
)
def test_an_own_forward_that_would_be_wrong_is_an_error(pass_, module, why):
    x = torch.randn(4, 6)
    fast = fxopt.optimize(Home(), pass_, example_inputs=(x,))
    expected = fast(x)
    with pytest.raises(GuardError, match="flag is False") as error:
        fast(x, True)
    assert f"no graph of module {module} fits this call: its graphs are for calls in which" in str(error.value)
    assert why in str(error.value)
    assert "example_inputs" in str(error.value)
    assert torch.equal(fast(x), expected)
    (missed,) = fxopt.report(fast).to_json()["missed"]
    assert "flag is False" in missed["guard"]
    assert (missed["calls"], missed["refused"]) == (1, True)


@dataclass(frozen=True)
class HalveAcceptably(Halve):
    """Multiply by a half, where the whole is acceptable, too."""

    own_forward: ClassVar[OwnForward] = OwnForward.ACCEPTABLE


@dataclass(frozen=True)
class Twice(Halve):
    """Compute the same, and say that the original forward does not."""

    numerics: ClassVar[Numerics] = Numerics.EXACT
    own_forward: ClassVar[OwnForward] = OwnForward.WRONG

    def rewrite(self, site, edit):
        relu = edit.graph_node("relu")
        edit.replace(relu, edit.call(torch.relu, edit.call(torch.relu, *relu.args)))


def test_a_pass_may_say_that_the_original_forward_is_acceptable():
    x, plain = torch.randn(4, 6), Home()
    fast = fxopt.optimize(plain, HalveAcceptably(), example_inputs=(x,))
    assert torch.equal(fast(x), plain(x) / 2)
    with pytest.warns(fxopt.GuardWarning, match="module 'block' \\(Small\\) used its original forward"):
        assert torch.equal(fast.block(x, True), plain.block(x, True))


def test_a_pass_may_say_that_the_original_forward_is_wrong():
    x, plain = torch.randn(4, 6), Home()
    fast = fxopt.optimize(plain, Twice(), example_inputs=(x,))
    assert torch.equal(fast(x), plain(x))
    with pytest.raises(GuardError, match="pass 'twice' changed what it computes"):
        fast.block(x, True)


def test_setting_an_attribute_of_such_a_module_is_an_error_at_the_next_call():
    class Scaled(Small):
        def __init__(self):
            super().__init__()
            self.scale = 2.0

        def forward(self, x):
            return torch.relu(self.linear(x)) * self.scale

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Scaled()

        def forward(self, x):
            return self.block(x)

    x = torch.randn(4, 6)
    fast = fxopt.optimize(Root(), Halve(), example_inputs=(x,))
    fast.block.scale = 3.0
    with pytest.raises(GuardError, match="attribute 'scale' was set after capture"):
        fast(x)
