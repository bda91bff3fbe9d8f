"""fuse_experts on loops as people write them: what it writes, and that it computes the same."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from mixtures import SPELLINGS, Block, Dense, Mixture, Named, Plain, Where
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import fxopt
from fxopt.passes import timing
from fxopt.passes.pipeline import parse
from fxopt.runtime.graphs import capture_of
from fxopt.testing import assert_equivalent
from fxopt.transforms.fuse_experts import FuseExperts, Lowering

FUSE = "fuse_experts{lowering=padded}"


def x_of(*shape: int) -> Tensor:
    return torch.randn(*shape, 16, generator=torch.Generator().manual_seed(7))


def fused(model: nn.Module, passes: object = FUSE, *, training: bool = False, **options: object) -> nn.Module:
    model.train(training)
    return fxopt.optimize(model, passes, example_inputs=(x_of(3, 12),), measure=False, **options)


def made(cls: type[nn.Module], *args: object) -> nn.Module:
    torch.manual_seed(3)
    return cls(*args)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_loop_over_experts_is_one_mixture(spelling: str, training: bool) -> None:
    model = made(SPELLINGS[spelling])
    fast = fused(model, training=training)
    assert [(d.status, d.choice) for d in fxopt.plan(fast).decisions] == [("applied", "padded")]
    graph = fxopt.graphs(fast)["experts" if spelling == "stacked" else ""]
    called = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    assert "mixture" in called and not any(name.startswith("experts") for name in called)
    for shape in ((3, 12), (5, 4), (1, 1)):
        assert_equivalent(model, fast, x_of(*shape), gradients=spelling == "stacked")


def test_what_is_written() -> None:
    fast = fused(made(Block))
    assert [f"{node.op} {node.target}" for node in fxopt.graphs(fast)["experts"].nodes] == [
        "placeholder hidden", "placeholder chosen", "placeholder weights",
        "get_attr gate_up_proj", "get_attr down_proj", "call_module mixture", "output output",
    ]  # fmt: skip


@pytest.mark.parametrize("lowering", [way.value for way in Lowering if way is not Lowering.AUTO])
def test_every_lowering_computes_the_same(lowering: str) -> None:
    for cls in (Block, Named):
        model = made(cls)
        fast = fused(model, f"fuse_experts{{lowering={lowering}}}", training=True)
        assert [d.choice for d in fxopt.plan(fast).decisions] == [lowering]
        torch.testing.assert_close(fast(x_of(2, 9)), model(x_of(2, 9)))


def lowering_of(model: nn.Module) -> str | None:
    """Return the lowering of what was fused in a model."""
    found = (module for module in model.modules() if type(module).__name__ == "FusedExperts")
    return next((str(module.lowering) for module in found), None)


@pytest.mark.parametrize(("fastest", "status"), [("gathered", "applied"), ("loop", "applied"), (None, "undone")])
def test_the_fastest_lowering_is_taken(fastest: str | None, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def time_candidates(candidates: Mapping[str, timing.Runner], **_: object) -> timing.Timings:
        return timing.Timings([{n: 0.5 + (lowering_of(run.module) != fastest) for n, run in candidates.items()}] * 20)

    monkeypatch.setattr(timing, "time_candidates", time_candidates)
    model = made(Where).eval()
    fast = fxopt.optimize(model, "fuse_experts", example_inputs=(x_of(3, 12),))
    (decision,) = fxopt.plan(fast).decisions
    assert (decision.status, lowering_of(fast)) == (status, fastest)
    assert set(decision.figures["lowerings"]) >= {"grouped", "padded", "gathered", "loop"}


def called(model: nn.Module, *args: object) -> set[str]:
    """Return the names of the modules that a call calls."""
    seen = set[nn.Module]()
    handle = register_module_forward_pre_hook(lambda module, _: seen.add(module))
    try:
        model(*args)
    finally:
        handle.remove()
    return {name for name, module in model.named_modules() if module in seen}


def test_no_graph_runs_the_loop_any_more() -> None:
    model = made(Where)
    plain = fxopt.optimize(model.eval(), (), example_inputs=(x_of(3, 12),), measure=False)
    for other in (model, plain):
        assert {"experts.0", "experts.0.w1"} <= called(other, x_of(4, 16))
    fast = fused(model)
    found = called(fast, x_of(4, 16))
    assert "mixture" in found and not any(name.startswith("experts") for name in found)
    assert not capture_of(fast).misses


def test_tokens_that_go_nowhere() -> None:
    model = made(Block).eval()
    fast = fused(model)
    hidden, weights = x_of(5), torch.rand(5, 2)
    chosen = torch.tensor([[0, 4], [1, 2], [4, 4], [3, 0], [4, 1]])  # 4 is no expert
    torch.testing.assert_close(fast.experts(hidden, chosen, weights), model.experts(hidden, chosen, weights))


def test_an_expert_that_gets_no_token_gets_zeros_for_a_gradient(step: Callable[..., Tensor]) -> None:
    model = made(Where)
    fast = fused(model, training=True)
    for each in (model, fast):
        step(each, torch.optim.SGD(each.parameters(), 0.1), x_of(1, 1))
    state = fast.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state[name], tensor)


def test_training_goes_as_with_the_loop(step: Callable[..., Tensor]) -> None:
    model = made(Named)
    fast = fused(model, training=True)
    slow, quick = (torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (model, fast))
    for number in range(4):
        x = x_of(4, 16) + number
        torch.testing.assert_close(step(fast, quick, x), step(model, slow, x))


def test_a_fused_model_is_fused_already() -> None:
    model = made(Where)
    fast = fused(model)
    again = fused(fast)
    assert str(fxopt.graphs(again)[""]) == str(fxopt.graphs(fast)[""])
    assert len([name for name, _ in again.named_modules() if "mixture" in name.split(".")[-1]]) == 1
    torch.testing.assert_close(again(x_of(2, 5)), model(x_of(2, 5)))


def test_the_users_model_is_untouched() -> None:
    model = made(Where)
    before = copy.deepcopy(model.state_dict())
    fused(model)
    assert type(model) is Where and type(model.experts[0]).__name__ == "Gated"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@given(st.sampled_from(Lowering))
def test_the_pass_is_text(lowering: Lowering) -> None:
    one = FuseExperts(lowering)
    assert parse(str(one)) == (one,)


def _with(change: Callable[[Mixture], object], cls: type[nn.Module] = Where, *args: object) -> nn.Module:
    model = made(cls, *args)
    change(model)
    return model


def _nothing(model: nn.Module) -> None:
    """Leave a model as it is."""


def _tie(model: Mixture) -> None:
    model.experts[1].w1.weight = model.experts[0].w1.weight


def _share(model: Mixture) -> None:
    model.experts[1] = model.experts[0]


def _pass_on(model: Mixture) -> None:
    model.experts[3] = nn.Identity()


def _other_activation(model: Mixture) -> None:
    model.experts["expert_2"].act = nn.ReLU()


def _norm(model: Mixture) -> None:
    for expert in model.experts.values():
        expert.act = nn.LayerNorm(8)


def _across(model: Mixture) -> None:
    for expert in model.experts.values():
        expert.act = nn.Softmax(0)


REFUSED: dict[str, tuple[Callable[[], nn.Module], bool, str]] = {
    "hooks": (lambda: _with(lambda m: m.experts[1].register_forward_hook(lambda *_: None)), False, "has hooks"),
    "tied": (lambda: _with(_tie), False, "is tied to"),
    "frozen": (lambda: _with(lambda m: m.experts[1].w1.requires_grad_(False)), False, "differ in requires_grad"),
    "activations": (lambda: _with(_other_activation, Named), False, "set up differently|do not all compute the same"),
    "norms": (lambda: _with(_norm, Named), False, "hold a LayerNorm"),
    "across": (lambda: _with(_across, Named), False, "hold a Softmax"),
    "router": (lambda: _with(lambda m: m.gate.weight.data.fill_(float("nan"))), False, "not all finite"),
    "dropout": (lambda: _with(_nothing, Named, lambda: Plain(0.1)), True, "draw random numbers"),
    "drawn": (lambda: _with(_nothing, Where, Dropping), True, "draw random numbers in training"),
    "alpha": (
        lambda: _with(_nothing, Where, lambda: Dropping(drop=F.alpha_dropout)),
        True,
        "random numbers in training",
    ),
    "always drawn": (lambda: _with(_nothing, Where, lambda: Dropping(always=True)), False, "in evaluation, too"),
    "shared": (lambda: _with(_share), False, "'experts.1' is the same module as 'experts.0'"),
    "identity": (lambda: _with(_pass_on), False, "'experts.3' is of the class Identity, and 'experts.0' of Gated"),
    "idle": (lambda: _with(lambda m: m.gate.weight.data.zero_(), Named), True, "leave expert"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    build, training, reason = REFUSED[case]
    model = build()
    fast = fused(model, training=training)
    (decision,) = fxopt.plan(fast).decisions
    assert decision.status in ("refused", "undone")
    assert re.search(reason, decision.reason or decision.status), decision.reason
    if case not in ("dropout", "drawn", "alpha", "always drawn"):
        torch.testing.assert_close(fast(x_of(2, 3)), model(x_of(2, 3)), equal_nan=True)


@pytest.mark.parametrize(("cls", "expert"), [(Named, lambda: Plain(0.5)), (Where, lambda: Dropping())])
def test_dropout_is_for_evaluation_only(cls: type[nn.Module], expert: Callable[[], nn.Module]) -> None:
    model = made(cls, expert)
    fast = fused(model)
    assert [d.status for d in fxopt.plan(fast).decisions] == ["applied"]
    torch.testing.assert_close(fast(x_of(2, 5)), model(x_of(2, 5)))
    results = list[Tensor]()
    for each in (model.train(), fast.train()):
        torch.manual_seed(5)
        results.append(each(x_of(2, 5)))
    torch.testing.assert_close(*results)


def test_every_token_to_every_expert_is_an_ensemble() -> None:
    (decision,) = fxopt.plan(fused(made(Dense), "fuse_experts")).decisions
    assert decision.reason == "every token goes to every expert; fuse_ensembles computes that"
    ensembles = fxopt.plan(fused(made(Dense), "fuse_ensembles{lowering=bmm}")).decisions
    assert "applied" in [decision.status for decision in ensembles]


def test_without_inputs_a_loop_is_refused() -> None:
    for cls in (Where, Named):
        (decision,) = fxopt.plan(fxopt.optimize(made(cls), "fuse_experts", measure=False)).decisions
        assert (decision.status, decision.reason.partition("; ")[2]) == ("refused", "give example_inputs")
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert fxopt.plan(fxopt.optimize(layers, "fuse_experts", measure=False)).decisions == ()


class Dropping(nn.Module):
    def __init__(self, *, always: bool = False, drop: Callable[..., Tensor] = F.dropout) -> None:
        super().__init__()
        self.always, self.drop = always, drop
        self.up, self.down = nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x), 0.5, True if self.always else self.training))


def test_alpha_dropout_that_is_told_the_mode_is_as_idle_in_evaluation_as_dropout() -> None:
    model = _with(_nothing, Where, lambda: Dropping(drop=F.alpha_dropout))
    fast = fused(model)
    assert [each.status for each in fxopt.plan(fast).decisions] == ["applied"]
    torch.testing.assert_close(fast(x_of(2, 3)), model(x_of(2, 3)))
