"""Equal blocks: found once, decided once, applied to each; what only looks equal is decided by itself."""

from __future__ import annotations

import collections
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from support.runs import manager_of
from support.subtractions import Subtractions
from torch import Tensor, fx, nn

import fxopt
from fxopt.errors import MatchFailure
from fxopt.passes import timing
from fxopt.passes.contract import Pass
from fxopt.passes.driver import Manager
from fxopt.passes.rewriting import Edit, ReadsOutOfOrder, module, operation
from fxopt.passes.sites import Goal, Numerics, Phase, Site
from fxopt.passes.timing import Timings
from fxopt.tracing.program import Program


class Block(nn.Module):
    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale - x


class OtherBlock(Block):
    """Nothing that was timed of a block holds for this one."""


def net(count: int = 5, *changed: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)), *changed).eval()


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


# -- passes --------------------------------------------------------------------------------------------------------


class OfLinears(Pass):
    """Find the linear of every block; what becomes of it is up to a subclass."""

    goal: ClassVar[Goal] = Goal.SIZE
    phase: ClassVar[Phase] = Phase.EVAL

    def find(self, program: Program) -> Iterator[Site]:
        for match in program.matches(module(nn.Linear, name="linear")):
            yield match.site()

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("linear")
        edit.replace(node, self.replacement(site, edit, node))

    def replacement(self, site: Site, edit: Edit, node: fx.Node) -> fx.Node:
        weight, bias = edit.get_attr("linear.weight", before=node), edit.get_attr("linear.bias", before=node)
        return edit.call(torch.nn.functional.linear, node.args[0], weight, bias, before=node)


@dataclasses.dataclass(frozen=True)
class WriteOut(OfLinears):
    """Read the parameters in the graph: right."""


class Calls(nn.Module):
    """Call a module that is not its child, so that no checkpoint holds it twice."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others = (other,)

    def forward(self, x: Tensor) -> Tensor:
        return self.others[0](x)


@dataclasses.dataclass(frozen=True)
class BorrowWeights(OfLinears):
    """Use the parameters of the first block in all of them."""

    def replacement(self, site: Site, edit: Edit, node: fx.Node) -> fx.Node:
        first = site.program.module("0.linear")
        child = edit.add_module(Calls(first), name="borrowed")
        return edit.call(child, node.args[0], before=node)


@dataclasses.dataclass(frozen=True)
class ByName(OfLinears):
    """Leave the bias out where the block has a certain name."""

    def replacement(self, site: Site, edit: Edit, node: fx.Node) -> fx.Node:
        if site.owner != "3":
            return super().replacement(site, edit, node)
        weight = edit.get_attr("linear.weight", before=node)
        return edit.call(torch.nn.functional.linear, node.args[0], weight, before=node)


@dataclasses.dataclass(frozen=True)
class BakeScale(Pass):
    """Keep the factor as a tensor of the graph, which is another one in the fourth block."""

    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: Program) -> Iterator[Site]:
        for match in program.matches(operation("mul", name="mul")):
            yield match.site()

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("mul")
        name = edit.add_constant(torch.tensor(0.5 + (1e-3 if site.owner == "3" else 0.0)), name="baked")
        edit.replace(node, edit.call(torch.mul, node.args[0], edit.get_attr(name, before=node), before=node))


@dataclasses.dataclass(frozen=True)
class SwitchByConstant(OfLinears):
    """Hide in a flag, which no example input tells, that the fourth block gives one row of what it gave at capture."""

    def replacement(self, site: Site, edit: Edit, node: fx.Node) -> fx.Node:
        (call,) = site.program.recording([site.program.module(site.owner)]).calls[site.program.module(site.owner)]
        seen = edit.add_constant(site.module("linear")(*call.args)[0].detach(), name="seen")
        flag = edit.add_constant(torch.tensor(site.owner == "3"), name="flag")
        real = super().replacement(site, edit, node)
        with edit.graph.inserting_before(node):
            arguments = (edit.graph.get_attr(flag), edit.graph.get_attr(seen), real)
        return edit.call(torch.where, *arguments, before=node)


@dataclasses.dataclass(frozen=True)
class Faster(WriteOut):
    """The same, for speed and in two ways."""

    goal: ClassVar[Goal] = Goal.SPEED

    def find(self, program: Program) -> Iterator[Site]:
        for site in super().find(program):
            yield dataclasses.replace(site, choices=("one", "two"))


@dataclasses.dataclass(frozen=True)
class Subtract(Subtractions):
    """Write `a - b` as a call of torch.sub."""

    numerics: ClassVar[Numerics] = Numerics.EXACT


# -- counting ------------------------------------------------------------------------------------------------------


WHOLE = [["after", "before"]] * 2
"""The whole model is raced on the example, and on a smaller batch."""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Note each full and each brief reference that is taken, and each set of candidates that is timed."""
    seen: dict[str, list[Any]] = {"full": [], "brief": [], "timed": []}
    taking = importlib.import_module("fxopt.passes.verification.reference")
    reference: Callable[..., Any] = taking.reference

    def noted(owner: nn.Module, *args: Any, brief: bool = False, **options: Any) -> Any:
        seen["brief" if brief else "full"].append(owner)
        return reference(owner, *args, brief=brief, **options)

    def timed(candidates: Any, **_: Any) -> Timings:
        seen["timed"].append(sorted(candidates))
        seconds = {"before": 3.0, "one": 2.0, "two": 1.0, "after": 1.0}
        return Timings([{name: seconds[name] for name in candidates}] * 9)

    monkeypatch.setattr(taking, "reference", noted)
    monkeypatch.setattr(timing, "time_candidates", timed)
    return seen


def managed(model: nn.Module, *passes: Pass, **options: Any) -> Manager:
    manager = manager_of(fxopt.capture(model, (X,)), **{"time": False, **options})
    manager.run(passes)
    return manager


def statuses(manager: Manager) -> list[str]:
    return [decision.status for decision in manager.decisions]


# -- decided once --------------------------------------------------------------------------------------------------


def test_equal_blocks_are_verified_with_noise_once(counted: dict[str, list[Any]]) -> None:
    model = net(6)
    manager = managed(model, WriteOut())
    assert statuses(manager) == ["applied"] * 6
    assert (len(counted["full"]), len(counted["brief"])) == (1, 5)
    assert [decision.figures.get("as") for decision in manager.decisions] == [None, *["0"] * 5]
    assert torch.allclose(manager.program.model(X), model(X))


def test_equal_blocks_are_timed_once_and_get_the_same_lowering(counted: dict[str, list[Any]]) -> None:
    manager = managed(net(6), Faster(), time=True)
    assert [decision.choice for decision in manager.decisions] == ["two"] * 6
    assert counted["timed"] == [["before", "one", "two"], *WHOLE]  # the first block, and the model
    assert {decision.figures["speedup"] for decision in manager.decisions} == {3.0}


def test_what_does_not_pay_is_not_tried_again(counted: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Timings([{"before": 1.0, "one": 2.0, "two": 2.0}] * 9)
    monkeypatch.setattr(timing, "time_candidates", lambda candidates, **_: slow)
    manager = managed(net(4), Faster(), time=True)
    assert statuses(manager) == ["undone"] * 4
    assert len({decision.reason for decision in manager.decisions}) == 1
    assert (len(counted["full"]), len(counted["brief"])) == (0, 0)  # what does not pay need not be right


@pytest.mark.parametrize(("failure", "tried"), [(MatchFailure, 2), (ReadsOutOfOrder, 1)])
def test_what_cannot_be_written_is_not_tried_again(
    failure: type[MatchFailure], tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Site] = []

    def rewrite(self: Faster, site: Site, edit: Edit) -> None:
        written.append(site)
        raise failure("it does not go")

    monkeypatch.setattr(Faster, "rewrite", rewrite)
    manager = managed(net(4), Faster(), time=True)
    assert statuses(manager) == ["refused"] * 4 and len(written) == tried
    assert {decision.reason for decision in manager.decisions} == {"it does not go"}


def test_blocks_that_take_as_long_are_timed_once_and_each_verified_in_full(counted: dict[str, list[Any]]) -> None:
    manager = managed(net(2, Block(0.25), Block(0.125)), Faster(), time=True)
    assert statuses(manager) == ["applied"] * 4
    assert counted["timed"] == [["before", "one", "two"], *WHOLE]
    assert (len(counted["full"]), len(counted["brief"])) == (3, 1)


def test_a_number_that_no_graph_reads_does_not_tell_blocks_apart(counted: dict[str, list[Any]]) -> None:
    model = net(4)
    for number, block in enumerate(model):
        block.layer_number = number
    assert statuses(managed(model, WriteOut())) == ["applied"] * 4
    assert (len(counted["full"]), len(counted["brief"])) == (1, 3)


def test_blocks_of_two_kinds_are_decided_twice(counted: dict[str, list[Any]]) -> None:
    managed(net(3, Block(0.25), Block(0.25)), WriteOut())
    assert (len(counted["full"]), len(counted["brief"])) == (2, 3)


def _transposed(block: Any) -> None:
    block.linear.weight = nn.Parameter(block.linear.weight.detach().t().contiguous().t())


@dataclasses.dataclass
class Setting:
    size: int = 1


def _with_a_hidden_setting(block: Any) -> None:
    block.setting = Setting()
    block.setting.hidden = 2


DIFFERENCES: dict[str, Callable[[Any], object]] = {
    "requires_grad": lambda block: block.linear.weight.requires_grad_(False),
    "strides": _transposed,
    "a number in its code": lambda block: setattr(block, "scale", 0.75),
    "a setting": lambda block: setattr(block.linear, "note", "another"),
    "a hidden setting": _with_a_hidden_setting,
    "a default": lambda block: setattr(block, "table", collections.defaultdict(int)),
    "mode": lambda block: block.linear.train(),
    "hooks": lambda block: block.linear.register_forward_hook(lambda *_: None),
    "structure": lambda block: setattr(block, "linear", nn.Linear(4, 4, bias=False)),
    "a tied tensor": lambda block: setattr(block.linear, "extra", block.linear.bias),
}


@pytest.mark.parametrize("change", DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_a_block_that_differs_in_more_than_values_is_decided_by_itself(
    counted: dict[str, list[Any]], change: Callable[[Any], object]
) -> None:
    model = net(3)
    for block in model:
        block.setting, block.table = Setting(), collections.defaultdict(list)
    change(model[1])
    managed(model, Subtract())
    assert (len(counted["full"]), len(counted["brief"])) == (2, 1)


def test_later_passes_see_equal_blocks_too(counted: dict[str, list[Any]]) -> None:
    managed(net(4), WriteOut(), Subtract())
    assert (len(counted["full"]), len(counted["brief"])) == (2, 6)


def test_the_model_runs_twice_a_pass_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    program = fxopt.capture(net(8), (X,))
    runs: list[int] = []
    program.model.register_forward_hook(lambda *_: runs.append(1))
    manager_of(program, time=False).run([WriteOut(), Subtract()])
    assert len(runs) <= 4


# -- only what is really equal -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [BorrowWeights(), ByName(), BakeScale(), SwitchByConstant()])
def test_a_pass_that_is_right_at_the_first_block_only_is_caught(wrong: Pass) -> None:
    model = net()
    manager = managed(model, wrong)
    decided = {decision.label: decision.status for decision in manager.decisions}
    assert decided["0"] == "applied"
    assert decided["3"] == "undone"
    if not isinstance(wrong, BorrowWeights):
        assert [decided[name] for name in "124"] == ["applied"] * 3
    other = torch.randn(3, 4)
    torch.testing.assert_close(manager.program.model(other), model(other))


def test_tensors_that_the_state_map_does_not_know_are_verified_in_full(counted: dict[str, list[Any]]) -> None:
    managed(net(3), BakeScale())
    assert (len(counted["full"]), len(counted["brief"])) == (3, 0)


# -- taken back, replayed, reported --------------------------------------------------------------------------------


def test_equal_blocks_go_together_when_the_model_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = iter([0.5, 0.5, 0.5, 2.0])  # three races say so, for the sites say otherwise

    def timed(candidates: Any, **_: Any) -> Timings:
        if set(candidates) == {"before", "after"}:
            return Timings([{"before": next(whole), "after": 1.0}] * 9)
        gain = 3.0 if isinstance(candidates["before"].module, OtherBlock) else 2.0
        return Timings([{"before": gain, "one": 1.5, "two": 1.0}] * 9)

    monkeypatch.setattr(timing, "time_candidates", timed)
    model = net(3, OtherBlock(0.25), OtherBlock(0.25))
    manager = managed(model, Faster(), Subtract(), time=True)
    assert statuses(manager) == ["undone"] * 3 + ["applied"] * 7
    texts = [str(graph) for name, graph in manager.program.graphs.items() if name]
    assert ["linear_weight" in text for text in texts] == [False] * 3 + [True] * 2
    assert all("torch.sub" in text for text in texts)
    torch.testing.assert_close(manager.program.model(X), model(X))
    replayed = manager_of(fxopt.capture(model, (X,)))
    replayed.repeat((Faster(), Subtract()), manager.plan((Faster(), Subtract())), verified=False)
    assert {n: str(g) for n, g in replayed.program.graphs.items()} == {
        n: str(g) for n, g in manager.program.graphs.items()
    }


def test_the_report_has_one_row_for_equal_blocks() -> None:
    fast = fxopt.optimize(net(4), passes=[WriteOut()], example_inputs=(X,), measure=False)
    table = fxopt.report(fast).table()
    assert "4 rewrites applied" in str(table)
    assert "| 0 and 3 more" in str(table)
    assert [decision.figures.get("as") for decision in fxopt.plan(fast).decisions] == [None, "0", "0", "0"]


def test_restoring_equal_blocks_gives_each_its_own_weights() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([head(x) for head in self.heads]).mean(0)

    model = nn.Sequential(*(Heads() for _ in range(4)))
    fast = fxopt.optimize(model, passes="fuse_ensembles{lowering=bmm}", example_inputs=(X,))
    assert {decision.status for decision in fxopt.plan(fast).decisions} == {"applied"}
    for one in (fxopt.state_dict(fast), fxopt.restore(fast).state_dict()):
        assert all(torch.equal(one[name], value) for name, value in model.state_dict().items())
    torch.testing.assert_close(fast(X), model(X))
