"""checkpoint: the same gradients bit by bit, in as much memory as the budget allows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxopt
from fxopt.compat import DispatchMode, all_modules
from fxopt.errors import BudgetError, MatchFailure, UsageError
from fxopt.passes import timing
from fxopt.passes.contract import Pass
from fxopt.passes.pipeline import parse
from fxopt.passes.rewriting import Edit, operation
from fxopt.passes.sites import Goal, Numerics, Site
from fxopt.passes.timing import LiveBytes, Timings, memory_use
from fxopt.runtime.graphs import WrappedRegion
from fxopt.tracing.examples import normalize_inputs
from fxopt.tracing.program import Program
from fxopt.transforms.checkpoint import Checkpoint, forward, recomputation
from fxopt.transforms.checkpoint.checkpoint import limit_of
from fxopt.transforms.checkpoint.find import Choices, Search, choices

Made = tuple[nn.Module, Tensor]


def checkpointed(made: Made, budget: float | str, **options: object) -> nn.Module:
    return fxopt.optimize(made[0], Checkpoint(budget), example_inputs=(made[1],), measure=False, **options)


def looked_up(made: Made, budget: float | str) -> Choices:
    program = fxopt.capture(copy.deepcopy(made[0]), (made[1],))
    return choices(program, lambda saved: limit_of(budget, saved))


def decisions(model: nn.Module) -> list[tuple[str, str]]:
    return [(d.status, d.reason) for d in fxopt.plan(model).decisions]


def step(model: nn.Module, x: Tensor, steps: int = 2) -> dict[str, Tensor]:
    """Return all that training changes, after some steps without an optimizer."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    torch.manual_seed(7)
    for _ in range(steps):
        output = model(x)
        output.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"output": output, "input": x.grad, "random": torch.rand(3), **gradients, **dict(model.named_buffers())}


def assert_bit_equal(a: nn.Module, b: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(step(a, x), step(b, x), rtol=0, atol=0)


@pytest.mark.parametrize("budget", [0.7, 0])
def test_gradients_statistics_and_dropout_are_the_same(made: Made, budget: float) -> None:
    fast = checkpointed(made, budget)
    assert {status for status, _ in decisions(fast)} == {"applied"}
    assert list(fast.state_dict()) == list(made[0].state_dict())
    assert_bit_equal(made[0], fast, made[1])


def test_memory_is_what_was_expected_and_less_for_less(made: Made) -> None:
    calls = normalize_inputs((made[1],))
    held, peaks = memory_use(made[0], calls).live, list[int]()
    for budget in (1.0, 0.7, 0):
        found = looked_up(made, budget)
        assert held == found.saved
        expected = Checkpoint(budget)._chosen(found).schedule
        used = memory_use(checkpointed(made, budget, verify=False), calls)
        assert used.live == pytest.approx(expected.live, rel=0.1)
        assert expected.live <= expected.peak <= found.saved
        peaks.append(used.peak)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]


def peak_of_step(model: nn.Module, x: Tensor) -> int:
    """Return the most bytes of a step with cross-entropy, the gradients of parameters being there already."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveBytes() as used:
        used.expect((list(model.parameters()), [p.grad for p in model.parameters()], list(model.buffers()), x))
        scores = model(x).flatten(0, -2)
        F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long)).backward()
    return used.peak


@pytest.mark.parametrize("classes", [4, 600])
def test_no_more_memory_than_with_each_block_checkpointed_by_hand(
    classes: int, deep_transformer: Callable[[int], nn.Module]
) -> None:
    model, x = deep_transformer(classes), torch.randn(4, 8, 16)
    by_hand = copy.deepcopy(model)
    for block in by_hand.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    found = looked_up((model, x), 0.5)
    fast = checkpointed((model, x), 0, verify=False)
    uses = [memory_use(each, normalize_inputs((x,))) for each in (fast, by_hand)]
    assert peak_of_step(fast, x) <= peak_of_step(by_hand, x)
    assert classes == 4 or uses[0].live <= uses[1].live
    fall = peak_of_step(model, x) - peak_of_step(checkpointed((model, x), 0.5, verify=False), x)
    assert fall >= 0.45 * found.saved  # gradients in flight are estimates


class DenseLayer(nn.Module):
    """A layer that reads all maps made before it; `efficient` computes what they are joined into again."""

    def __init__(self, given: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(given), nn.Conv2d(given, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.efficient = False

    def narrowed(self, *maps: Tensor) -> Tensor:
        return self.conv1(F.relu(self.norm1(torch.cat(maps, 1))))

    def forward(self, maps: list[Tensor]) -> Tensor:
        y = checkpoint(self.narrowed, *maps, use_reentrant=False) if self.efficient else self.narrowed(*maps)
        return self.conv2(F.relu(self.norm2(y)))


class DenseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(8 + 4 * number, 4) for number in range(6))

    def forward(self, x: Tensor) -> Tensor:
        maps = [x]
        for layer in self.layers:
            maps.append(layer(maps))
        return torch.cat(maps, 1)


def test_layers_that_are_called_with_lists_are_in_regions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), DenseBlock(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).train()
    x, by_hand = torch.randn(2, 3, 14, 14), copy.deepcopy(model)
    for layer in by_hand[1].layers:
        layer.efficient = True
    fast = checkpointed((model, x), 0)
    assert {status for status, _ in decisions(fast)} == {"applied"}
    assert_bit_equal(model, fast, x)
    uses = [memory_use(each, normalize_inputs((x,))) for each in (fast, by_hand, model)]
    assert uses[0].live < uses[1].live < uses[2].live
    assert uses[0].peak <= uses[1].peak < uses[2].peak


def test_where_no_region_lowers_the_peak_none_is_made() -> None:
    model, x = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 4), nn.Tanh()).train(), torch.randn(32, 4)
    ((status, reason),) = decisions(checkpointed((model, x), 0))
    assert status == "refused"
    assert reason.endswith("and no region would lower the peak of a step")


def targets(model: nn.Module, owner: str) -> list[str]:
    return [str(node.target) for node in fxopt.graphs(model)[owner].nodes]


def graphs(model: nn.Module) -> dict[str, str]:
    return {name: str(graph) for name, graph in fxopt.graphs(model).items()}


def test_the_graph_before_and_after() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Tanh(), nn.Linear(64, 4)).train()
    x = torch.randn(32, 4)
    fast = checkpointed((model, x), 0.5)
    plain = fxopt.optimize(model, [], example_inputs=(x,), measure=False)
    assert targets(plain, "") == ["input", "0", "1", "2", "3", "output"]
    assert targets(fast, "") == ["input", "checkpointed", "2", "3", "output"]
    assert targets(fast, "checkpointed") == ["input_1", "0", "1", "output"]
    assert len(fast) == 4


class Products(DispatchMode):
    """Count the matrix products and convolutions that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in recomputation.PRODUCTS
        return func(*args, **(kwargs or {}))


def products_of_backward(model: nn.Module, x: Tensor) -> int:
    loss = model(x).square().sum()
    with Products() as products:
        loss.backward()
    return products.count


def test_selective_regions_keep_their_products_and_compute_the_rest_again(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    stretches = Search.stretches
    monkeypatch.setattr(Search, "stretches", lambda self: {r: s for r, s in stretches(self).items() if r.selective})
    fast = checkpointed(made, 0)
    assert fxopt.plan(fast).decisions
    assert all(d.status == "applied" and d.site["data"]["selective"] for d in fxopt.plan(fast).decisions)
    assert_bit_equal(made[0], fast, made[1])
    calls = normalize_inputs((made[1],))
    assert memory_use(fast, calls).live < memory_use(made[0], calls).live
    assert products_of_backward(fast, made[1]) == products_of_backward(copy.deepcopy(made[0]), made[1])


def test_whole_regions_compute_their_products_again(transformer: Made) -> None:
    fast = checkpointed(transformer, 0)
    assert not all(d.site["data"]["selective"] for d in fxopt.plan(fast).decisions)
    assert products_of_backward(fast, transformer[1]) > products_of_backward(
        copy.deepcopy(transformer[0]), transformer[1]
    )


def test_in_evaluation_and_without_gradients_regions_just_run(
    transformer: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = checkpointed(transformer, 0)

    def refuse(*_: object) -> None:
        raise AssertionError("checkpointed")

    monkeypatch.setattr(recomputation, "checkpoint", refuse)
    with torch.no_grad():
        fast(transformer[1])
    torch.testing.assert_close(fast.eval()(transformer[1]), transformer[0].eval()(transformer[1]), rtol=0, atol=0)
    with pytest.raises(AssertionError, match="checkpointed"):
        fast.train()(transformer[1])


@pytest.mark.parametrize("name", ["transformer", "residual_network"])
def test_a_region_runs_again_in_its_mode(name: str, request: pytest.FixtureRequest) -> None:
    made = request.getfixturevalue(name)
    fast = checkpointed(made, 0)
    for model in (made[0], fast):
        output = seeded(model)(made[1])
        model.eval()
        output.square().sum().backward()
        assert not any(module.training for module in model.modules())
    for expected, found in zip(made[0].parameters(), fast.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)


def test_a_region_runs_again_with_the_tensors_that_it_was_given(residual_network: Made) -> None:
    def gradients(model: nn.Module) -> list[Tensor]:
        given = {name: 2 * parameter for name, parameter in model.named_parameters()}
        loss = torch.func.functional_call(model, given, (residual_network[1],)).square().sum()
        own = [*map(id, (*model.parameters(), *model.buffers()))]
        found = torch.autograd.grad(loss, list(model.parameters()))
        assert own == [*map(id, (*model.parameters(), *model.buffers()))]
        return [*found, *model.buffers()]

    fast = checkpointed(residual_network, budget=0)
    for found, expected in zip(gradients(fast), gradients(copy.deepcopy(residual_network[0])), strict=True):
        assert torch.equal(found, expected)


def test_the_same_autocast_holds_when_a_region_runs_again(transformer: Made) -> None:
    fast = checkpointed(transformer, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = (model(transformer[1]) for model in map(seeded, (transformer[0], fast)))
    for model, output in ((transformer[0], expected), (fast, found)):
        output.float().square().sum().backward()
        assert output.dtype is torch.bfloat16
        assert model is not None
    gradients = [[p.grad for p in model.parameters()] for model in (transformer[0], fast)]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def seeded(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return model


def test_running_statistics_are_the_same_tensors_after_a_backward_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    made = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 2)).train(), torch.randn(8, 4)
    fast = checkpointed(made, 0)
    loss, buffers = fast(made[1]).sum(), dict(fast.named_buffers())
    counted = {name: buffer.clone() for name, buffer in buffers.items()}

    def fail(*_: object, **__: object) -> Tensor:
        raise ArithmeticError("the second run fails")

    monkeypatch.setattr(torch.nn.functional, "batch_norm", fail)
    with pytest.raises(ArithmeticError, match="the second run fails"):
        loss.backward()
    assert all(buffer is buffers[name] for name, buffer in fast.named_buffers())
    torch.testing.assert_close(dict(fast.named_buffers()), counted, rtol=0, atol=0)


def test_second_derivatives(residual_network: Made) -> None:
    fast = checkpointed(residual_network, 0, verify=False)

    def penalty(model: nn.Module) -> list[Tensor]:
        x = residual_network[1].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return list(torch.autograd.grad(slope.square().sum(), list(model.parameters()), allow_unused=True))

    torch.testing.assert_close(penalty(fast), penalty(copy.deepcopy(residual_network[0])), rtol=0, atol=0)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_refuses_a_model_in_evaluation(transformer: Made) -> None:
    fast = checkpointed((transformer[0].eval(), transformer[1]), 0.5)
    assert [status for status, _ in decisions(fast)] == ["refused"]
    assert "the model is in evaluation; call model.train() first" in decisions(fast)[0][1]


def test_refuses_what_is_checkpointed_already(transformer: Made) -> None:
    fast = checkpointed(transformer, 0.7)
    again = fxopt.optimize(fast, Checkpoint(0), example_inputs=(transformer[1],), measure=False)
    assert "it is checkpointed already" in decisions(again)[-1][1]


def test_a_block_with_hooks_is_in_no_region(transformer: Made) -> None:
    model, called = transformer[0], []
    model.blocks[1].register_forward_hook(lambda *_: called.append(1))
    fast = checkpointed(transformer, 0, verify=False)
    called.clear()
    fast(transformer[1]).sum().backward()
    assert called == [1]
    assert ("refused", "it has hooks, which would run twice") in decisions(fast)


def test_noise_of_functions_without_a_module_is_drawn_again() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.first(x)) * torch.rand(x.shape)
            return self.last(torch.sigmoid(y + torch.randn_like(y)) * torch.full_like(y, 0.5).bernoulli())

    made = Noisy().train(), torch.rand(64, 8)
    fast = checkpointed(made, 0)
    assert "applied" in {status for status, _ in decisions(fast)}
    assert_bit_equal(made[0], fast, made[1])


def test_noise_that_is_saved_before_it_is_drawn_is_in_no_region() -> None:
    model, x = (
        nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.RReLU(), nn.Linear(16, 8), nn.GELU()).train(),
        torch.randn(4, 8),
    )
    fast = fxopt.optimize(model, Checkpoint(0), example_inputs=(x,), measure=False, verify=False)
    assert any("the noise that it draws" in reason for _, reason in decisions(fast))
    assert_bit_equal(model, fast, x)


def test_a_value_that_is_written_into_later_is_given_to_no_region() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            z = torch.sigmoid(torch.tanh(torch.exp(y)))
            return z + y.mul_(2)

    model, x = Writes().train(), torch.randn(64, 4)
    fast = fxopt.optimize(model, Checkpoint(0), example_inputs=(x,), measure=False)
    assert_bit_equal(model, fast, x)


def test_a_module_that_is_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.BatchNorm1d(8), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return self.part(self.part(x))

    made = Twice().train(), torch.randn(16, 8)
    fast = checkpointed(made, 0)
    assert "applied" in {status for status, _ in decisions(fast)}
    assert_bit_equal(*((made[0], fast)), made[1])


def test_a_budget_that_cannot_be_met_says_what_can(transformer: Made) -> None:
    with pytest.raises(BudgetError, match=r"^pass 'checkpoint': budget=0.001 allows .* least possible is .* 0\.\d+ of"):
        checkpointed(transformer, 0.001)
    with pytest.raises(BudgetError, match="budget=1KiB allows 1 KiB of activations"):
        checkpointed(transformer, "1KiB")


def held(model: nn.Module) -> float:
    memory = fxopt.report(model).to_json()["memory"]
    return memory["live_after"] / memory["live_before"]


@pytest.mark.parametrize("passes", ["checkpoint{budget=0.5}", "autocast,checkpoint{budget=0.5}"])
def test_a_budget_is_met_however_little_time_there_is(passes: str, made: Made) -> None:
    fast = fxopt.optimize(made[0], passes, example_inputs=(made[1],), time_budget=0.001, measure=False)
    assert {status for status, _ in decisions(fast) if "autocast" not in passes} <= {"applied"}
    assert held(fast) <= 0.5  # of what the model holds that was given, in float32


@dataclasses.dataclass(frozen=True)
class Add(Pass):
    """Write `a + b` as a call of torch.add, for speed."""

    goal: ClassVar[Goal] = Goal.SPEED
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def find(self, program: Program) -> Iterator[Site]:
        yield from (match.site() for match in program.matches(operation("add", name="add")))

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("add")
        edit.replace(node, edit.call(torch.add, *node.args))


def test_what_memory_costs_in_time_does_not_speak_against_other_passes(
    transformer: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(candidates: Any, **_: Any) -> Timings:
        costs = [candidates[name].module for name in candidates if name == "after"]
        slower = costs and any(isinstance(each, WrappedRegion) for each in all_modules(costs[0]))
        return Timings([{name: 2.0 if name == "before" else 3.0 if slower else 1.0 for name in candidates}] * 9)

    monkeypatch.setattr(timing, "time_candidates", timed)
    fast = fxopt.optimize(transformer[0], [Add(), Checkpoint(0.5)], example_inputs=(transformer[1],))
    assert {status for status, _ in decisions(fast)} == {"applied"}
    assert held(fast) <= 0.5  # of modules, too, that were timed without a change
    assert fxopt.report(fast).to_json()["timings"]["speedup"] < 1


def test_a_budget_that_is_missed_raises(transformer: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite = Checkpoint.rewrite

    def in_first_block(self: Checkpoint, site: Site, edit: Edit) -> None:
        if not site.owner.startswith("blocks.0"):
            raise MatchFailure("it cannot be run again")
        rewrite(self, site, edit)

    monkeypatch.setattr(Checkpoint, "rewrite", in_first_block)
    with pytest.raises(
        BudgetError,
        match=r"budget=0.4 allows .* least reached .* places were left, as .* cannot be run again",
    ):
        checkpointed(transformer, 0.4)


@pytest.mark.parametrize("budget", [1, "2GB"])
def test_a_budget_that_is_met_already_says_so(budget: float | str, transformer: Made) -> None:
    ((status, reason),) = decisions(checkpointed(transformer, budget))
    assert status == "refused"
    assert f"of activations, which budget={budget} allows: nothing has to be computed again" in reason


@pytest.mark.parametrize("budget", [-0.1, 1.5, "lots", "2", "3 parsecs", True, float("nan")])
def test_a_budget_is_a_share_or_bytes(budget: object) -> None:
    with pytest.raises(UsageError, match="give a share of what the model saves, from 0 to 1, or bytes with a unit"):
        Checkpoint(budget)


def test_bytes_and_shares_mean_the_same(transformer: Made) -> None:
    found = looked_up(transformer, 0.5)
    budget = f"{found.saved / 2048}KiB"
    same = looked_up(transformer, budget)
    assert Checkpoint(budget)._chosen(same).schedule == Checkpoint(0.5)._chosen(found).schedule


# -- afterwards --------------------------------------------------------------------------------------------------------


def test_checkpoints_go_both_ways(residual_network: Made) -> None:
    model, fast = residual_network[0], checkpointed(residual_network, 0)
    other = copy.deepcopy(model)
    fast(residual_network[1])
    other.load_state_dict(fast.state_dict())
    fast.load_state_dict(model.state_dict())
    assert_bit_equal(model, fast, residual_network[1])
    restored = fxopt.restore(fast)
    assert [type(module) for module in restored.modules()] == [type(module) for module in model.modules()]
    assert_bit_equal(model, restored, residual_network[1])


def test_plans_and_archives_repeat_the_regions(transformer: Made, tmp_path: object) -> None:
    fast = checkpointed(transformer, 0.7)
    again = fxopt.optimize(transformer[0], plan=fxopt.plan(fast), example_inputs=(transformer[1],))
    assert graphs(again) == graphs(fast)
    assert_bit_equal(transformer[0], again, transformer[1])
    fxopt.save(fast, f"{tmp_path}/model.fxopt")
    loaded = fxopt.load(f"{tmp_path}/model.fxopt", model=transformer[0])
    assert graphs(loaded) == graphs(fast)
    assert_bit_equal(transformer[0], loaded.train(), transformer[1])


def test_the_report_says_what_memory_is_taken(transformer: Made) -> None:
    fast = fxopt.optimize(transformer[0], "checkpoint{budget=0.5}", example_inputs=(transformer[1],))
    memory = fxopt.report(fast).to_json()["memory"]
    assert memory["live_after"] <= 0.5 * memory["live_before"]
    assert "of activations after a forward" in str(fxopt.report(fast).table())


def test_fused_ensembles_are_checkpointed() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(4))
            self.last = nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.stack([head(x) for head in self.heads]).mean(0))

    model, x = Heads().train(), torch.randn(32, 8)
    fast = fxopt.optimize(
        model, "fuse_ensembles{lowering=bmm},checkpoint{budget=0}", example_inputs=(x,), measure=False
    )
    fused = fxopt.optimize(model, "fuse_ensembles{lowering=bmm}", example_inputs=(x,), measure=False)
    assert {status for status, _ in decisions(fast)} == {"applied"}
    assert_bit_equal(fused, fast, x)


def test_what_goes_wrong_on_fake_tensors_is_not_swallowed(
    transformer: tuple[nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = transformer
    raised: list[str] = []

    def once(*args: object) -> float:
        if not raised:
            raised.append("once")
            raise AttributeError("a fault of the cost model")
        return 1.0

    monkeypatch.setattr(forward, "flops_of", once)
    with pytest.raises(
        fxopt.PassError, match=r"pass 'checkpoint' \(find\) raised AttributeError: a fault of the cost model"
    ):
        fxopt.optimize(model, "checkpoint", example_inputs=x)


@settings(max_examples=30)
@given(st.one_of(st.floats(0, 1), st.integers(1, 10**6).map(lambda n: f"{n}MiB")).map(Checkpoint))
def test_text_round_trip(pass_: Checkpoint) -> None:
    assert parse(str(pass_)) == (pass_,)


def test_in_a_pipeline_text() -> None:
    assert parse("checkpoint{budget=2GiB}") == (Checkpoint("2GiB"),)
    assert parse("checkpoint{budget=0.25}") == (Checkpoint(0.25),)


def test_what_runs_under_autocast_is_checkpointed_there(residual_network: Made) -> None:
    model, x = residual_network
    options = {"example_inputs": (x,), "measure": False, "verify": False}
    wide = fxopt.optimize(model, "autocast{dtype=bfloat16}", **options)
    fast = fxopt.optimize(model, "autocast{dtype=bfloat16},checkpoint{budget=0}", **options)
    assert "applied" in {status for status, _ in decisions(fast)[len(decisions(wide)) :]}
    assert_bit_equal(wide, fast, x)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_compiled_regions_compute_the_same() -> None:
    model, x = (
        nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 2)).train(),
        torch.randn(8, 4),
    )
    fast = checkpointed((model, x), 0, verify=False)
    eager = step(fast, x, steps=1)
    torch.compile(fast, backend="aot_eager")(x).square().sum().backward()
    tensors = {name: parameter.grad for name, parameter in fast.named_parameters()} | dict(fast.named_buffers())
    torch.testing.assert_close(tensors, {name: eager[name] for name in tensors}, rtol=0, atol=0)


def test_bert() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).train()
    tokens, calls = torch.randint(50, (2, 12)), {}
    fast = checkpointed((model, tokens), 0.6, verify=False)
    for name, each in (("plain", model), ("fast", fast)):
        torch.manual_seed(0)
        each(tokens).last_hidden_state.square().sum().backward()
        calls[name] = {key: parameter.grad for key, parameter in each.named_parameters()}
    torch.testing.assert_close(calls["fast"], calls["plain"], rtol=0, atol=0)
    before, after = (memory_use(each, normalize_inputs((tokens,))).live for each in (model, fast))
    assert after <= 0.6 * before


def test_a_region_whose_results_nobody_reads():
    class Unread(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                self.linear(x)
            return self.linear(x)

    x, model = torch.randn(3, 4), Unread()
    assert torch.equal(fxopt.optimize(model, "checkpoint", example_inputs=(x,), measure=False)(x), model(x))
