"""The pass manager: sites land whole or not at all, and stay only where they are right and pay."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, cast

import pytest
import torch
import torch.nn.functional as F
from support.runs import manager_of
from support.subtractions import Subtractions
from torch import Tensor, fx, nn

import fxopt
from fxopt.errors import MatchFailure, PassError, PlanError
from fxopt.passes import timing
from fxopt.passes.contract import Pass
from fxopt.passes.driver import Manager, comparison
from fxopt.passes.rewriting import Edit, module, operation
from fxopt.passes.sites import Goal, Numerics, Phase, Refusal, Site
from fxopt.passes.timing import Timings
from fxopt.runtime.graphs import capture_of
from fxopt.settings import Settings
from fxopt.tracing.program import Program


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x) - x)


class Net(nn.Module):
    """Two equal blocks, and one subtraction of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            y = block(y)
        return y - x.sin()


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


# -- passes --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RewriteSubtractions(Subtractions):
    """Write them as functions: right."""


@dataclasses.dataclass(frozen=True)
class SwapOperands(Subtractions):
    """Swap the operands: wrong."""

    def replacement(self, site: Site, edit: Edit, node: fx.Node) -> fx.Node:
        return edit.call(torch.sub, node.args[1], node.args[0])


@dataclasses.dataclass(frozen=True)
class SwapOperandsInPlace(SwapOperands):
    """Swap the operands in the root only, and leave the others right."""

    def replacement(self, site: Site, edit: Edit, node: fx.Node) -> fx.Node:
        return super().replacement(site, edit, node) if not site.owner else edit.call(torch.sub, *node.args)


@dataclasses.dataclass(frozen=True)
class DropBias(Pass):
    """Leave the biases of linear layers out: wrong."""

    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: Program) -> Iterator[Site]:
        for match in program.matches(module(nn.Linear, name="linear")):
            yield match.site()

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("linear")
        edit.replace(node, edit.call(F.linear, node.args[0], edit.get_attr(f"{node.target}.weight", before=node)))


@dataclasses.dataclass(frozen=True)
class RaiseMidway(Subtractions):
    """Change the graph, the modules and the state map, and then raise."""

    kind: type[Exception] = ValueError

    def rewrite(self, site: Site, edit: Edit) -> None:
        name = edit.add_module(nn.Linear(4, 4), name="linear")
        edit.add_constant(torch.ones(1), name="constant")
        node = edit.graph_node("sub")
        edit.replace(node, edit.call(name, node.args[0]))
        raise self.kind("half way")


@dataclasses.dataclass(frozen=True)
class RaiseAtHome(Subtractions):
    """Raise in the root, the last site."""

    def replacement(self, site: Site, edit: Edit, node: fx.Node) -> fx.Node:
        if not site.owner:
            raise ValueError("not here")
        return edit.call(torch.sub, *node.args)


@dataclasses.dataclass(frozen=True)
class Crash(Subtractions):
    """Write something that raises when it runs."""

    def replacement(self, site: Site, edit: Edit, node: fx.Node) -> fx.Node:
        return edit.call(torch.Tensor.view, node.args[0], 12345)


@dataclasses.dataclass(frozen=True)
class Lowerings(Subtractions):
    """Several lowerings of each subtraction, of which one is wrong and one cannot be written."""

    offered: tuple[str, ...] = ("unsuitable", "wrong", "first", "second")
    required: bool = False

    goal: ClassVar[Goal] = Goal.SPEED

    def find(self, program: Program) -> Iterator[Site]:
        for match in program.matches(operation("sub", name="sub")):
            yield match.site(choices=self.offered, required=self.required)

    def replacement(self, site: Site, edit: Edit, node: fx.Node) -> fx.Node:
        match site.choice:
            case "unsuitable":
                raise MatchFailure("it cannot be written so")
            case "wrong":
                return edit.call(torch.sub, node.args[1], node.args[0])
            case "first":
                return edit.call(torch.sub, *node.args)
            case _:
                return edit.call(torch.add, node.args[0], edit.call(torch.neg, node.args[1]))


@dataclasses.dataclass(frozen=True)
class Upon(Pass):
    """Rewrite what `Lowerings` wrote."""

    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: Program) -> Iterator[Site]:
        for owner, graph in program.graphs.items():
            for node in graph.find_nodes(op="call_function", target=torch.sub):
                yield Site(program, owner, {"sub": node.name})

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("sub")
        edit.replace(node, edit.call(torch.subtract, *node.args))


@dataclasses.dataclass(frozen=True)
class Exactly(SwapOperands):
    """Promise bits, and round otherwise."""

    numerics: ClassVar[Numerics] = Numerics.EXACT

    def replacement(self, site: Site, edit: Edit, node: fx.Node) -> fx.Node:
        part = edit.call(torch.add, edit.call(torch.sub, *node.args), 8.0)
        return edit.call(torch.sub, part, 8.0)


@dataclasses.dataclass(frozen=True)
class ByDesign(SwapOperands):
    """Change the function, and say so."""

    numerics: ClassVar[Numerics] = Numerics.SEMANTIC


@dataclasses.dataclass(frozen=True)
class Outline(Subtractions):
    """Put the subtraction of each module into a region."""

    goal: ClassVar[Goal] = Goal.MEMORY

    def rewrite(self, site: Site, edit: Edit) -> None:
        inside = [node for node in edit.graph.nodes if node.op in ("call_module", "call_function")]
        edit.outline(inside, name="region")


@dataclasses.dataclass(frozen=True)
class Refuse(Pass):
    """Refuse everything."""

    def find(self, program: Program) -> Iterator[Refusal]:
        yield Refusal("not today", at=next(iter(program.graph("").nodes)))
        yield Refusal("nor here", at="blocks.0")


@dataclasses.dataclass(frozen=True)
class Nonsense(Pass):
    """Find something that is no site."""

    def find(self, program: Program) -> Iterator[Site]:
        yield "here"


@dataclasses.dataclass(frozen=True)
class Wordless(Pass):
    """Refuse a place without a reason."""

    def find(self, program: Program) -> Iterator[Refusal]:
        yield Refusal(cast("str", None), "here")


@dataclasses.dataclass(frozen=True)
class RaiseInFind(Pass):
    """Raise after a first site."""

    def find(self, program: Program) -> Iterator[Site]:
        yield Site(program, "", {})
        raise KeyError("lost")


@dataclasses.dataclass(frozen=True)
class Hang(Subtractions):
    """Never return."""

    def rewrite(self, site: Site, edit: Edit) -> None:
        edit.erase(edit.call(torch.sin, next(iter(edit.graph.nodes))))
        time.sleep(60)


# -- tools ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def program() -> Program:
    return fxopt.capture(Net(), (X,))


def managed(program: Program, *passes: Pass, **options: object) -> Manager:
    manager = manager_of(program, **{"time": False, **options})
    manager.run(passes)
    return manager


def statuses(manager: Manager) -> list[tuple[str, str]]:
    return [(decision.label, decision.status) for decision in manager.decisions]


def trace_of(program: Program) -> object:
    modules = dict(program.model.named_modules())
    return (
        {name: str(graph) for name, graph in program.graphs.items()},
        {name: (id(module), type(module), list(vars(module))) for name, module in modules.items()},
        {
            name: (id(tensor), tensor.clone().tolist())
            for name, tensor in program.model.state_dict(keep_vars=True).items()
        },
    )


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Mapping[str, object]], Mapping[str, float]]], None]:
    """Replace the clock: a function from the candidates to the seconds that each takes."""

    def install(seconds: Callable[[Mapping[str, object]], Mapping[str, float]]) -> None:
        def time_candidates(candidates: Mapping[str, object], **options: object) -> Timings:
            for run in candidates.values():
                run()
            return Timings([dict(seconds(candidates))] * 20)

        monkeypatch.setattr(timing, "time_candidates", time_candidates)

    return install


def takes(**seconds: float) -> Callable[[Mapping[str, object]], Mapping[str, float]]:
    return lambda candidates: {name: seconds.get(name, 1.0) for name in candidates}


# -- right and wrong -----------------------------------------------------------------------------------------------


def test_a_right_rewrite_lands_at_each_site(program: Program) -> None:
    expected = program.model(X)
    manager = managed(program, RewriteSubtractions())
    assert statuses(manager) == [("(root)", "applied"), ("blocks.0", "applied"), ("blocks.1", "applied")]
    assert all("call_function[target=torch.sub]" in str(graph) for graph in program.graphs.values())
    assert torch.equal(program.model(X), expected)
    assert {decision.figures["checked"] for decision in manager.decisions} == {"float64"}
    assert manager.history.checked() == "float64"


WRONG = {
    SwapOperands(): "output differs",
    DropBias(): "gradient of linear.bias is lost",
    Crash(): "the rewritten module raises RuntimeError: shape '[12345]' is invalid",
    Exactly(): "output is not bitwise the same",
}


@pytest.mark.parametrize("pass_", WRONG, ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_a_wrong_rewrite_is_undone_with_its_reason(pass_: Pass, training: bool) -> None:
    program = fxopt.capture(Net().train(training), (X,))
    before = trace_of(program)
    manager = managed(program, pass_)
    assert {decision.status for decision in manager.decisions} == {"undone"}
    assert all(decision.reason.startswith(WRONG[pass_]) for decision in manager.decisions)
    assert trace_of(program) == before


def test_without_verification_it_lands(program: Program) -> None:
    manager = managed(program, SwapOperands(), check=False)
    assert {decision.status for decision in manager.decisions} == {"applied"}
    assert manager.history.checked() == "unverified: verify=False"


def test_one_site_is_judged_without_the_others(program: Program) -> None:
    expected = program.model(X)
    manager = managed(program, SwapOperandsInPlace())
    assert statuses(manager) == [("(root)", "undone"), ("blocks.0", "applied"), ("blocks.1", "applied")]
    assert torch.equal(program.model(X), expected)


def test_a_change_by_design_need_only_run(program: Program) -> None:
    expected = program.model(X)
    manager = managed(program, ByDesign())
    assert {decision.status for decision in manager.decisions} == {"applied"}
    assert manager.history.checked() == "that it runs (its results differ by design)"
    assert not torch.allclose(program.model(X), expected)


def test_without_inputs_nothing_can_be_compared() -> None:
    manager = managed(fxopt.capture(Net()), SwapOperands())
    assert manager.history.checked() == "unverified: no example inputs"


def test_regions_are_verified_like_anything_else(program: Program) -> None:
    expected, state = program.model(X), list(program.model.state_dict())
    manager = managed(program, Outline(), RewriteSubtractions())
    assert {decision.status for decision in manager.decisions} == {"applied"}
    assert {decision.label for decision in manager.decisions[3:]} == {"region", "blocks.0.region", "blocks.1.region"}
    assert torch.equal(program.model(X), expected)
    assert list(program.model.state_dict()) == state


def test_verification_leaves_the_model_and_the_random_state_alone(program: Program) -> None:
    random_state = torch.get_rng_state()
    program.model.blocks[0].linear.weight.grad = torch.ones(4, 4)
    before = trace_of(program)
    managed(program, SwapOperands())
    assert trace_of(program) == before
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(program.model.blocks[0].linear.weight.grad, torch.ones(4, 4))


# -- failures ------------------------------------------------------------------------------------------------------

FAILURES = {
    RaiseMidway(): r"pass 'raise_midway' \(site \(root\):sub\) raised ValueError: half way",
    RaiseMidway(kind=KeyError): r"pass 'raise_midway' \(site \(root\):sub\) raised KeyError",
    Nonsense(): r"pass 'nonsense': find yielded str, expected a Site or a Refusal",
    Wordless(): r"pass 'wordless': find yielded a Refusal whose reason is no text",
    RaiseInFind(): r"pass 'raise_in_find' \(find\) raised KeyError: 'lost'",
    Hang(): r"pass 'hang' \(site \(root\):sub\) took longer than 0.1 s",
    Pass(): r"pass 'pass' \(find\) raised NotImplementedError: Pass.find",
}


@pytest.mark.parametrize("pass_", FAILURES, ids=str)
def test_a_failing_pass_is_named_and_leaves_no_trace(program: Program, pass_: Pass) -> None:
    before, expected = trace_of(program), program.model(X)
    written: list[PassError] = []

    def write(error: PassError) -> str:
        written.append(error)
        return "reproduce.py"

    with pytest.raises(PassError, match=FAILURES[pass_]) as caught:
        managed(program, pass_, settings=Settings(pass_timeout=0.1), on_failure=write)
    assert trace_of(program) == before
    assert torch.equal(program.model(X), expected)
    assert written == [caught.value]
    assert caught.value.reproducer == "reproduce.py"


def test_a_late_failure_keeps_what_landed_before(program: Program) -> None:
    class Reversed(RaiseAtHome):
        def find(self, program: Program) -> Iterator[Site | Refusal]:
            yield from reversed(list(super().find(program)))

    expected = program.model(X)
    with pytest.raises(PassError, match="not here"):
        managed(program, Reversed())
    assert ["torch.sub" in str(graph) for graph in program.graphs.values()] == [False, True, True]
    assert torch.equal(program.model(X), expected)


def test_refusals_say_where_and_why(program: Program) -> None:
    manager = managed(program, Refuse())
    assert [(d.label, d.status, d.reason) for d in manager.decisions] == [
        ("x", "refused", "not today"),
        ("blocks.0", "refused", "nor here"),
    ]


def test_passes_are_traced(program: Program) -> None:
    manager = managed(program, RewriteSubtractions(), SwapOperandsInPlace(), Refuse())
    assert [(trace.name, trace.decided, trace.applied) for trace in manager.traces] == [
        ("rewrite_subtractions", 3, 3),
        ("swap_operands_in_place", 3, 2),
        ("refuse", 2, 0),
    ]
    assert all(trace.seconds > 0 for trace in manager.traces)
    assert [decision.step for decision in manager.decisions] == [0] * 3 + [1] * 3 + [2] * 2


# -- lowerings and time --------------------------------------------------------------------------------------------


def test_untimed_the_first_right_lowering_is_taken(program: Program) -> None:
    manager = managed(program, Lowerings())
    assert [decision.choice for decision in manager.decisions] == ["first"] * 3


def test_unverified_the_first_that_can_be_written_is_taken(program: Program) -> None:
    manager = managed(program, Lowerings(), check=False)
    assert [decision.choice for decision in manager.decisions] == ["wrong"] * 3


def test_the_fastest_right_lowering_is_taken(program: Program, timed: Callable[..., None]) -> None:
    timed(takes(before=1.0, wrong=0.1, first=0.5, second=0.25, after=0.9))
    expected = program.model(X)
    manager = managed(program, Lowerings(), time=True)
    assert [(d.choice, d.status) for d in manager.decisions] == [("second", "applied")] * 3
    figures = manager.decisions[0].figures
    assert (figures["speedup"], figures["speedup_low"], figures["speedup_high"]) == (4.0, 4.0, 4.0)
    assert figures["lowerings"] == {"first": 0.5e6, "second": 0.25e6}
    torch.testing.assert_close(program.model(X), expected)


def test_equally_fast_lowerings_are_taken_in_the_order_offered(program: Program, timed: Callable[..., None]) -> None:
    timed(takes(before=1.0, first=0.5, second=0.5, after=0.9))
    for offered in (("first", "second"), ("second", "first")):
        manager = managed(program, Lowerings(offered=offered), time=True)
        assert {decision.choice for decision in manager.decisions} == {offered[0]}
        program = fxopt.capture(Net(), (X,))


def test_a_slower_rewrite_is_undone_with_its_figures(program: Program, timed: Callable[..., None]) -> None:
    timed(takes(before=1.0, wrong=3.0, first=2.0, second=1.25))
    before = trace_of(program)
    manager = managed(program, Lowerings(), time=True)
    assert {d.status for d in manager.decisions} == {"undone"}
    assert {d.reason for d in manager.decisions} == {"no faster: 0.8x (0.8 to 0.8) as second"}
    assert "checked" not in manager.decisions[0].figures  # what does not pay need not be right
    assert trace_of(program) == before


def test_a_rewrite_that_may_be_slower_is_not_clearly_faster(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def uneven(candidates: Mapping[str, object], **options: object) -> Timings:
        rounds = [(1.0, 0.5), (3.0, 2.0), (2.0, 3.0)] * 4
        return Timings([{name: old if name == "before" else new for name in candidates} for old, new in rounds])

    monkeypatch.setattr(timing, "time_candidates", uneven)
    manager = managed(program, Lowerings(offered=("first",)), time=True)
    assert {d.reason for d in manager.decisions} == {"not clearly faster: 1.5x (0.667 to 2) as first"}
    for figures in (decision.figures for decision in manager.decisions):
        assert figures["before_us"] / figures["after_us"] == pytest.approx(figures["speedup"])
        assert figures["lowerings"]["first"] == figures["after_us"]


def test_what_was_asked_for_by_name_stays_though_slower(program: Program, timed: Callable[..., None]) -> None:
    timed(takes(before=1.0, first=2.0, after=3.0))
    manager = managed(program, Lowerings(offered=("first",), required=True), time=True)
    assert {(d.status, d.figures["speedup"]) for d in manager.decisions} == {("applied", 0.5)}


def test_where_nothing_is_right_all_reasons_are_given(program: Program) -> None:
    manager = managed(program, Lowerings(offered=("unsuitable", "wrong")))
    assert {d.status for d in manager.decisions} == {"undone"}
    assert all("differs" in d.reason and "it cannot be written so" in d.reason for d in manager.decisions)
    manager = managed(program, Lowerings(offered=("unsuitable",)))
    assert {(d.status, d.reason) for d in manager.decisions} == {("refused", "it cannot be written so")}


def test_only_passes_for_speed_are_timed(program: Program, timed: Callable[..., None]) -> None:
    timed(lambda candidates: pytest.fail("timed"))
    managed(program, RewriteSubtractions(), time=True)


def _slow_with(*names: str) -> Callable[[Mapping[str, object]], Mapping[str, float]]:
    """Say that each site is faster, the first least, and that the whole model is slower while any of `names` stands."""
    gains = iter([1.5, 3.0, 2.0])

    def is_slow(model: nn.Module) -> bool:
        modules = dict(model.named_modules())
        return any("torch.sub" in str(capture_of(modules[name]).specializations[0].graph) for name in names)

    def seconds(candidates: Mapping[str, object]) -> Mapping[str, float]:
        if "after" not in candidates:
            return dict.fromkeys(candidates, 1.0) | {"before": next(gains)}
        models = {name: each.module for name, each in candidates.items() if name != "before"}
        return {"before": 1.0, **{name: 2.0 if is_slow(model) else 0.5 for name, model in models.items()}}

    return seconds


def test_a_slower_model_takes_back_the_least_certain(program: Program, timed: Callable[..., None]) -> None:
    timed(_slow_with(""))
    expected = program.model(X)
    manager = managed(program, Lowerings(offered=("first",)), time=True)
    assert statuses(manager) == [("(root)", "undone"), ("blocks.0", "applied"), ("blocks.1", "applied")]
    assert manager.decisions[0].reason == "the whole model was slower with it (0.5x)"
    assert ["torch.sub" in str(graph) for graph in program.graphs.values()] == [False, True, True]
    assert torch.equal(program.model(X), expected)
    speeds = {"speedup": 2.0, "speedup_low": 2.0, "speedup_high": 2.0}
    assert manager.timings is not None
    found = {name: value for name, value in manager.timings.items() if "sizes" not in name}
    assert found == {"before_ms": 1000.0, "after_ms": 500.0, **speeds}


def test_what_makes_the_model_slower_goes_though_others_are_less_certain(
    program: Program, timed: Callable[..., None]
) -> None:
    timed(_slow_with("blocks.0"))
    manager = managed(program, Lowerings(offered=("first",)), time=True)
    assert [status for _, status in statuses(manager)] == ["applied", "undone", "applied"]


@dataclasses.dataclass(frozen=True)
class Tidy(Subtractions):
    """A clean-up at the root."""

    clean_up: ClassVar[bool] = True

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        return (site for site in super().find(program) if isinstance(site, Site) and not site.owner)


@dataclasses.dataclass(frozen=True)
class LoweringsOfBlocks(Lowerings):
    """The root is left alone."""

    def find(self, program: Program) -> Iterator[Site]:
        return (site for site in super().find(program) if site.owner)


def test_clean_ups_that_make_the_model_slower_go_first(program: Program, timed: Callable[..., None]) -> None:
    timed(_slow_with(""))
    manager = managed(program, Tidy(), LoweringsOfBlocks(offered=("first",)), time=True)
    assert [status for _, status in statuses(manager)] == ["undone", "applied", "applied"]
    assert manager.decisions[0].reason == "the whole model was slower with it (0.5x)"


def test_a_clean_up_that_is_all_there_is_is_timed_with_the_model(program: Program, timed: Callable[..., None]) -> None:
    timed(_slow_with(""))
    manager = managed(program, Tidy(), LoweringsOfBlocks(offered=("unsuitable",)), time=True)
    assert [status for _, status in statuses(manager)] == ["undone", "refused", "refused"]


def test_what_stood_on_a_rewrite_goes_with_it(program: Program, timed: Callable[..., None]) -> None:
    timed(_slow_with(""))
    expected = program.model(X)
    manager = managed(program, Lowerings(offered=("first",)), Upon(), time=True)
    assert [status for _, status in statuses(manager)] == ["undone", "applied", "applied"] * 2
    assert "it depended on a rewrite that was undone" in manager.decisions[3].reason
    assert ["torch.subtract" in str(graph) for graph in program.graphs.values()] == [False, True, True]
    assert torch.equal(program.model(X), expected)
    replayed = fxopt.capture(Net(), (X,))
    manager_of(replayed).repeat((Lowerings(offered=("first",)), Upon()), manager.plan(()), verified=False)
    assert {n: str(g) for n, g in replayed.graphs.items()} == {n: str(g) for n, g in program.graphs.items()}


# -- plans ---------------------------------------------------------------------------------------------------------


def test_a_plan_repeats_the_same_graphs_without_looking(
    monkeypatch: pytest.MonkeyPatch, timed: Callable[..., None]
) -> None:
    timed(takes(before=1.0, first=0.5, second=0.25, after=0.9))
    passes = (Lowerings(), SwapOperandsInPlace(), Refuse())
    first = fxopt.capture(Net(), (X,))
    plan = managed(first, *passes, time=True).plan(passes)
    monkeypatch.setattr(comparison.verification, "reference", lambda *a, **k: pytest.fail("verified"))
    timed(lambda candidates: pytest.fail("timed"))
    second = fxopt.capture(Net())
    manager = manager_of(second)
    manager.repeat(passes, plan, verified=False)
    texts = [
        {name: graph.python_code("self").src for name, graph in program.graphs.items()} for program in (first, second)
    ]
    assert texts[0] == texts[1]
    assert [d.status for d in manager.decisions] == ["applied"] * len(manager.decisions)


def test_a_plan_that_does_not_fit_is_refused(program: Program) -> None:
    plan = managed(program, RewriteSubtractions()).plan((RewriteSubtractions(),))
    other = fxopt.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (X,))
    with pytest.raises(PlanError, match=r"the plan's site \(root\):sub of pass 'rewrite_subtractions' is not in this"):
        manager_of(other).repeat((RewriteSubtractions(),), plan, verified=False)


def test_a_plan_with_an_unknown_choice_fails_by_name(program: Program) -> None:
    plan = managed(program, Lowerings()).plan((Lowerings(),))
    decisions = tuple(dataclasses.replace(decision, choice="unsuitable") for decision in plan.decisions)
    before = trace_of(other := fxopt.capture(Net(), (X,)))
    with pytest.raises(
        PlanError, match=r"\(root\):sub of pass 'lowerings' cannot be rewritten: it cannot be written so"
    ):
        manager_of(other).repeat((Lowerings(),), dataclasses.replace(plan, decisions=decisions), verified=False)
    assert trace_of(other) == before


def test_phases_are_those_of_the_program() -> None:
    @dataclasses.dataclass(frozen=True)
    class OnlyEval(RewriteSubtractions):
        phase: ClassVar[Phase] = Phase.EVAL

    manager = managed(fxopt.capture(Net().eval(), (X,)), OnlyEval())
    assert manager.plan((OnlyEval(),)).phase == "eval"
    assert {rewrite.phase for rewrite in manager.rewrites} == {Phase.EVAL}
