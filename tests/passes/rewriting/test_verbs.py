"""The verbs of an edit, each with a pass that needs it: children, tensors, attributes, regions with a context."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from support.runs import manager_of
from torch import Tensor, fx, nn

import fxopt
from fxopt import Context, Edit, Goal, Numerics, OwnForward, Pass, Program, Refusal, Select, Site, StateWarning
from fxopt.compat import children_of
from fxopt.errors import MatchFailure, PassError, PlanError
from fxopt.runtime.graphs import select

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(6, hidden)
        self.act = nn.ReLU()
        self.down = nn.Linear(hidden, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    """Blocks in a `Sequential`, one activation between them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(Block(), nn.ReLU(), Block(), nn.Dropout(0.0))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def optimized(model: nn.Module, passes: Any, **options: Any) -> Any:
    return fxopt.optimize(model, passes, **{"example_inputs": (X,), "measure": False, "time_budget": 600.0, **options})


def statuses(model: nn.Module) -> list[tuple[str, str]]:
    return [(decision.status, decision.reason) for decision in fxopt.plan(model).decisions]


def trace_of(model: nn.Module) -> Any:
    """Return everything that undoing must bring back."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    plain = {n: {k: repr(v) for k, v in vars(m).items() if k[0] != "_"} for n, m in modules.items()}
    return [(n, id(m), type(m)) for n, m in modules.items()], [(n, id(t)) for n, t in tensors.items()], plain


# -- a child in another's place --------------------------------------------------------------------------------------


class Rectifier(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + x.abs()) / 2


@dataclass(frozen=True)
class SwapActivations(Pass):
    """Replace ReLU modules where they stand; `wrong` ones compute something else."""

    wrong: bool = False

    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for match in program.matches(fxopt.module(nn.ReLU, name="relu")):
            yield match.site()

    def rewrite(self, site: Site, edit: Edit) -> None:
        edit.replace_module(site["relu"], nn.Sigmoid() if self.wrong else Rectifier())


def test_a_child_is_swapped_in_a_sequential() -> None:
    model = Net()
    fast = optimized(model, SwapActivations())
    assert [type(child).__name__ for child in fast.body] == ["Block", "Rectifier", "Block", "Dropout"]
    assert [type(child).__name__ for child in fast.body[0].children()] == ["Linear", "Rectifier", "Linear"]
    assert {status for status, _ in statuses(fast)} == {"applied"}
    torch.testing.assert_close(fast(X), model(X))
    assert list(fast.state_dict()) == list(model.state_dict())
    restored = fxopt.restore(fast)
    assert [type(child) for child in restored.body] == [type(child) for child in model.body]
    assert torch.equal(restored(X), model(X))


def test_a_wrong_child_goes_again_without_a_rest() -> None:
    program = fxopt.capture(Net(), (X,))
    before = trace_of(program.model)
    manager = manager_of(program, time=False)
    manager.run([SwapActivations(wrong=True)])
    assert {decision.status for decision in manager.decisions} == {"undone"}
    assert trace_of(program.model) == before


def test_a_swapped_child_in_place() -> None:
    model = Net()
    expected, first = model(X), model.body[0]
    assert optimized(model, SwapActivations(), inplace=True) is model
    assert model.body[0] is first
    assert type(model.body[1]).__name__ == "Rectifier"
    torch.testing.assert_close(model(X), expected)


def test_a_shared_child_is_swapped_under_all_its_names_or_not_at_all() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
            self.second = nn.Sequential(nn.Linear(6, 6), self.first[1])

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    program = fxopt.capture(Shared(), (X,))
    edit = Edit(program, Site(program, "first", {}), "test_pass")
    with pytest.raises(MatchFailure, match=r"'first\.1' is also called 'second\.1', outside the site"):
        edit.replace_module("1", Rectifier())
    edit = Edit(program, Site(program, "", {}), "test_pass")
    edit.replace_module("first.1", Rectifier())
    assert program.model.first[1] is program.model.second[1]
    assert isinstance(program.model.second[1], Rectifier)


def test_what_cannot_be_replaced() -> None:
    model = Net()
    model.head.register_forward_hook(lambda *_: None)
    program = fxopt.capture(model, (X,))
    edit = Edit(program, Site(program, "", {}), "test_pass")
    with pytest.raises(MatchFailure, match="'head' has hooks"):
        edit.replace_module("head", nn.Linear(6, 2))
    with pytest.raises(MatchFailure, match="the whole model cannot be replaced"):
        edit.replace_module("", nn.Linear(6, 2))


NO_ARGUMENTS: dict[str, tuple[Callable[[Site, Edit], Any], str]] = {
    "no context": (
        lambda site, edit: edit.outline([site["head"]], name="part", context=Context("zork")),
        r": there is no context 'zork'; the kinds are autocast, no_grad, .*, checkpoint",
    ),
    "a number for a context": (
        lambda site, edit: edit.outline([site["head"]], name="part", context=3),  # pyright: ignore[reportArgumentType]
        r": context is of type int; give a Context, or a function",
    ),
    "a wrapper that returns nothing": (
        lambda site, edit: edit.outline([site["head"]], name="part", wrapper=lambda _: None),  # pyright: ignore[reportArgumentType]
        r": what the wrapper returned is of type NoneType; give a torch\.nn\.Module that calls the region",
    ),
    "nothing for a module": (
        lambda site, edit: edit.replace_module(site["head"], None),  # pyright: ignore[reportArgumentType]
        r": module is of type NoneType; give the torch\.nn\.Module to put there",
    ),
    "nothing to add": (
        lambda _, edit: edit.add_module(None, name="part"),  # pyright: ignore[reportArgumentType]
        r": module is of type NoneType; give the torch\.nn\.Module to add",
    ),
    "a function that returns no context": (
        lambda site, edit: edit.outline([site["head"]], name="part", context=lambda: 5),  # pyright: ignore[reportArgumentType]
        r": context=<lambda> returned int, which is no context manager; give a function that returns a new one",
    ),
    "no such node": (
        lambda *_: None,
        r"find yielded a site with a node that is not there: the graph of '\(root\)' has no node 'haed'; did you",
    ),
    "no such owner": (
        lambda *_: None,
        r"pass 'no_argument': find yielded a site whose owner is not there: the model has no module 'haed'; did you",
    ),
}


@pytest.mark.parametrize("case", NO_ARGUMENTS)
def test_an_argument_that_is_none_is_named_in_one_line(case: str) -> None:
    change, words = NO_ARGUMENTS[case]

    @dataclass(frozen=True)
    class NoArgument(Pass):
        """Give what cannot be taken."""

        goal: ClassVar[Goal] = Goal.SIZE

        def find(self, program: Program) -> Iterator[Site | Refusal]:
            if case == "no such owner":
                yield Site(program, "haed", {})
            if case == "no such node":
                yield Site(program, "", {"head": "haed"})
            call = next(node for node in program.graph("").nodes if node.target == "head")
            yield Site(program, "", {"head": call.name})

        def rewrite(self, site: Site, edit: Edit) -> None:
            change(site, edit)

    model = Net()
    before = trace_of(model)
    with pytest.raises(PassError, match=words) as caught:
        optimized(model, NoArgument())
    assert "\n" not in str(caught.value)
    assert trace_of(model) == before


def test_a_module_without_a_graph_is_replaced_whole() -> None:
    class Expert(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([row * 2 if row.sum().item() > 0 else row * 2.0 for row in x])

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    @dataclass(frozen=True)
    class ReplaceExpert(Pass):
        """Replace a loop that depends on data."""

        goal: ClassVar[Goal] = Goal.SIZE

        def find(self, program: Program) -> Iterator[Site | Refusal]:
            yield Site(program, "0", {})

        def rewrite(self, site: Site, edit: Edit) -> None:
            edit.replace_module("", Twice())

    model = nn.Sequential(Expert(), nn.Linear(6, 6))
    fast = optimized(model, ReplaceExpert())
    assert statuses(fast) == [("applied", "")]
    assert type(fast[0]).__name__ == "Twice"
    assert torch.equal(fast(X), model(X))


# -- a region with something around it -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint(Pass):
    """Compute the inside of each block again for its backward."""

    how: str = "context"

    numerics: ClassVar[Numerics] = Numerics.EXACT
    goal: ClassVar[Goal] = Goal.MEMORY
    own_forward: ClassVar[OwnForward | None] = OwnForward.ACCEPTABLE

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for owner, capture in program.captures.items():
            if type(program.module(owner)).__name__ == "Block":
                nodes = [n.name for n in capture.specializations[0].graph.nodes if n.op == "call_module"]
                yield Site(program, owner, {f"inside_{number}": name for number, name in enumerate(nodes)})

    def rewrite(self, site: Site, edit: Edit) -> None:
        inside = [site[label] for label in site.nodes]
        if self.how == "context":
            edit.outline(inside, name="part", context=Context("checkpoint"))
        elif self.how == "function":
            edit.outline(inside, name="part", context=grad_mode)
        else:
            edit.outline(inside, name="part", wrapper=Counting)


def grad_mode() -> Any:
    return torch.enable_grad()


class Counting(nn.Module):
    """Call a region, and count how often."""

    def __init__(self, region: nn.Module) -> None:
        super().__init__()
        self.region, self.calls = region, [0]

    def forward(self, *args: Any) -> Any:
        self.calls[0] += 1
        return self.region(*args)


def saved_by(model: nn.Module) -> int:
    """Return how many tensors the backward of a model keeps."""
    kept: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(X)
    return len(kept)


def test_a_checkpointed_block_keeps_less_and_gives_the_same() -> None:
    model = Net()
    fast = optimized(model, Checkpoint())
    assert {status for status, _ in statuses(fast)} == {"applied"}
    assert "checkpoint" in str(fast.body[0].part)
    assert saved_by(fast) < saved_by(model)
    results = []
    for each in (model, fast):
        each(X).square().sum().backward()
        results.append([parameter.grad for parameter in each.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert list(fast.state_dict()) == list(model.state_dict())
    assert [n for n, _ in fast.named_parameters()] == [n for n, _ in model.named_parameters()]
    copied = copy.deepcopy(fast)
    assert torch.equal(copied(X), model(X))
    assert saved_by(copied) == saved_by(fast)


@pytest.mark.parametrize("how", ["function", "wrapper"])
def test_any_context_and_any_wrapper(how: str) -> None:
    model = Net()
    fast = optimized(model, Checkpoint(how))
    assert {status for status, _ in statuses(fast)} == {"applied"}
    assert torch.equal(fast(X), model(X))
    assert list(fast.state_dict()) == list(model.state_dict())
    if how == "wrapper":
        before = fast.body[0].part.calls[0]
        fast(X)
        assert fast.body[0].part.calls[0] == before + 1


def test_an_outlined_region_with_a_context_is_undone_without_a_rest() -> None:
    program = fxopt.capture(Net(), (X,))
    before, texts = trace_of(program.model), {name: str(graph) for name, graph in program.graphs.items()}
    site = next(iter(Checkpoint().find(program)))
    edit = Edit(program, site, "test_pass")
    with edit.watched():
        Checkpoint().rewrite(site.read_through(edit.own_graphs), edit)
        edit.finish()
    assert trace_of(program.model) != before
    edit.undo()
    assert trace_of(program.model) == before
    assert {name: str(graph) for name, graph in program.graphs.items()} == texts


# -- channels removed over two modules -------------------------------------------------------------------------------


@dataclass(frozen=True)
class PruneHidden(Pass):
    """Remove the hidden units of each block whose incoming weights are smallest.

    Before: down(act(up(x)))        After: the same with fewer units
    Refuses: nothing.
    """

    keep: float = 0.5

    numerics: ClassVar[Numerics] = Numerics.SEMANTIC
    goal: ClassVar[Goal] = Goal.SIZE
    own_forward: ClassVar[OwnForward | None] = OwnForward.RIGHT

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for name in program.captures:
            block = program.module(name)
            if type(block).__name__ == "Block":
                units = block.up.weight.abs().sum(1).argsort(descending=True)[: int(self.keep * len(block.up.weight))]
                parts = [Site(program, f"{name}.{child}", {}) for child in ("up", "down")]
                yield Site.over(program, *parts, data={"kept": sorted(units.tolist())}, label=name)

    def rewrite(self, site: Site, edit: Edit) -> None:
        up, down = (edit.owner.get_submodule(child) for child in ("up", "down"))
        kept, size = tuple(site.data["kept"]), len(up.weight)
        cuts = (("up.weight", up.weight, 0), ("up.bias", up.bias, 0), ("down.weight", down.weight, 1))
        for name, tensor, dim in cuts:
            step = Select(name, name, dim, kept, size)
            edit.set_tensor(name, *step.forward([tensor]), step)
        edit.set_attribute("up", "out_features", len(kept))
        edit.set_attribute("down", "in_features", len(kept))


def zeroed(model: Net, plan: fxopt.Plan) -> Net:
    """Return a copy of a model with zeros in the places of what a plan removes."""
    result = copy.deepcopy(model)
    for decision in plan.decisions:
        assert decision.site is not None
        block, kept = result.get_submodule(decision.label), decision.site["data"]["kept"]
        gone = [unit for unit in range(8) if unit not in kept]
        with torch.no_grad():
            block.up.weight[gone] = 0
            block.up.bias[gone] = 0
            block.down.weight[:, gone] = 0
    return result


def quiet_state(model: nn.Module) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StateWarning)
        return fxopt.state_dict(model)


def test_hidden_units_are_removed_over_two_modules() -> None:
    model = Net().eval()
    fast = optimized(model, PruneHidden())
    assert statuses(fast) == [("applied", ""), ("applied", "")]
    block = fast.body[0]
    assert [tuple(p.shape) for p in block.parameters()] == [(4, 6), (4,), (6, 4), (6,)]
    assert (block.up.out_features, block.down.in_features) == (4, 4)
    torch.testing.assert_close(fast(X), zeroed(model, fxopt.plan(fast))(X))
    assert (model.body[0].up.out_features, model.body[0].up.weight.shape) == (8, (8, 6))


def test_the_plan_decides_and_not_the_weights() -> None:
    fast = optimized(Net().eval(), PruneHidden())
    plan = fxopt.Plan.from_json(json.loads(json.dumps(fxopt.plan(fast).to_json())))
    other = Net().eval()
    nn.init.normal_(other.body[0].up.weight)
    again = fxopt.optimize(other, PruneHidden(), plan=plan)
    assert [d.site for d in fxopt.plan(again).decisions] == [d.site for d in fxopt.plan(fast).decisions]
    torch.testing.assert_close(again(X), zeroed(other, plan)(X))


def test_a_planned_site_that_is_not_in_the_model_is_an_error() -> None:
    plan = fxopt.plan(optimized(Net().eval(), PruneHidden()))
    with pytest.raises(PlanError, match="is not in this model"):
        fxopt.optimize(nn.Sequential(nn.Linear(6, 6)), PruneHidden(), plan=plan)


def test_an_archive_keeps_what_was_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered = {"fxopt.passes": [_Entry("prune_hidden", PruneHidden)]}
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: registered.get(group, []))
    fast = optimized(Net().eval(), PruneHidden())
    path = tmp_path / "pruned.fxopt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StateWarning)
        fxopt.save(fast, path)
    loaded = fxopt.load(path, model=Net())
    assert torch.equal(loaded(X), fast(X))
    assert loaded.body[2].up.weight.shape == (4, 6)


class _Entry:
    """An entry point."""

    def __init__(self, name: str, found: Any) -> None:
        self.name, self.value, self.dist, self._found = name, f"test:{name}", None, found

    def load(self) -> Any:
        return self._found


def test_checkpoints_fit_both_ways_told_by_shape() -> None:
    model = Net().eval()
    fast = optimized(model, PruneHidden())
    expected = zeroed(model, fxopt.plan(fast))
    with pytest.warns(StateWarning, match="zeros in the places of what a lossy pass cut away"):
        saved = fxopt.state_dict(fast)
    assert {n: t.shape for n, t in saved.items()} == {n: t.shape for n, t in model.state_dict().items()}
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.state_dict().items())
    plain = Net().eval()
    plain.load_state_dict(saved)
    torch.testing.assert_close(plain(X), fast(X))

    other = Net().eval()
    nn.init.normal_(other.body[0].up.weight)
    nn.init.normal_(other.body[2].down.weight)
    for load in (fxopt.load_state_dict, lambda m, s: m.load_state_dict(s)):
        pruned = optimized(model, PruneHidden(), plan=fxopt.plan(fast))
        load(pruned, other.state_dict())  # from before
        torch.testing.assert_close(pruned(X), zeroed(other, fxopt.plan(fast))(X))
        cut = {name: tensor.clone() for name, tensor in pruned.named_parameters()}
        again = optimized(model, PruneHidden(), plan=fxopt.plan(fast))
        load(again, cut)  # from after, as it is
        torch.testing.assert_close(again(X), pruned(X))
    with pytest.raises(RuntimeError, match=r"size mismatch for body\.0\.up\.weight"):
        fast.load_state_dict({**other.state_dict(), "body.0.up.weight": torch.zeros(5, 6)})


def test_optimizer_state_is_cut_along() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()
    fast = optimized(model, PruneHidden())
    moments = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
    fxopt.translate_optimizer(optimizer, fast)
    kept = fxopt.plan(fast).decisions[0].site["data"]["kept"]
    block = fast.body[0]
    assert torch.equal(optimizer.state[block.up.weight]["exp_avg"], moments["body.0.up.weight"][kept])
    assert torch.equal(optimizer.state[block.down.weight]["exp_avg"], moments["body.0.down.weight"][:, kept])
    optimizer.zero_grad()
    before = block.up.weight.detach().clone()
    fast(X).sum().backward()
    optimizer.step()
    assert not torch.equal(block.up.weight, before)


def test_what_was_removed_is_restored_as_zeros_with_its_attributes() -> None:
    model = Net().eval()
    fast = optimized(model, PruneHidden())
    with pytest.warns(StateWarning):
        restored = fxopt.restore(fast)
    assert (restored.body[0].up.out_features, restored.body[0].down.in_features) == (8, 8)
    torch.testing.assert_close(restored(X), fast(X))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StateWarning)
        again = optimized(restored, PruneHidden(), plan=fxopt.plan(fast))
    torch.testing.assert_close(again(X), fast(X))


def test_pruning_in_place_changes_the_user_s_own_model() -> None:
    model = Net().eval()
    expected = optimized(model, PruneHidden())(X)
    up = model.body[0].up
    assert optimized(model, PruneHidden(), inplace=True) is model
    assert model.body[0].up is up
    assert (up.out_features, up.weight.shape) == (4, (4, 6))
    assert torch.equal(model(X), expected)


def test_a_cut_over_two_modules_is_undone_without_a_rest() -> None:
    program = fxopt.capture(Net().eval(), (X,))
    before = trace_of(program.model)
    site = next(iter(PruneHidden().find(program)))
    edit = Edit(program, site, "prune_hidden")
    with edit.watched():
        PruneHidden().rewrite(site, edit)
        edit.finish()
    assert len(edit.state_map().steps) == 3
    assert edit.state_map().steps[0].sources == ("up.weight",)
    assert edit.state_map_of_model().steps[0].sources == ("body.0.up.weight",)
    edit.undo()
    assert trace_of(program.model) == before


class Halves(nn.Module):
    """Its forward is a graph, which equal ones share."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x[..., : x.shape[-1] // 2]) + x.chunk(2, -1)[1]


class Gated(Block):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.down = Halves(), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x) * 2).flip(-1))


def shapes_in(program: Program) -> dict[str, dict[str, str]]:
    """Return what each node of each graph is known to give, of the form of tensors."""
    return {name: {n.name: str(n.meta.get("val")) for n in graph.nodes} for name, graph in program.graphs.items()}


def test_nodes_behind_a_cut_know_their_new_shapes_and_undoing_gives_the_old_back() -> None:
    def cut(site: Site, edit: Edit) -> None:
        for name, dim, kept in (("up.weight", 0, 4), ("up.bias", 0, 4), ("down.weight", 1, 2)):
            tensor = edit.owner.get_parameter(name)
            edit.set_tensor(name, tensor.narrow(dim, 0, kept), Select(name, name, dim, tuple(range(kept)), kept * 2))

    program = fxopt.capture(nn.Sequential(Gated(), Gated()), (X,))
    graphs, before, text = program.graphs, shapes_in(program), trace_of(program.model)
    assert graphs["0.act"] is graphs["1.act"]
    edit = Edit(program, Site(program, "0", {}), "test_pass")
    with edit.watched():
        cut(edit.site, edit)
        edit.finish()
    now = shapes_in(program)
    assert {n: now["0"][n] for n in ("up", "mul", "act", "flip", "down")} == {
        "up": "float32[5, 4]", "mul": "float32[5, 4]", "act": "float32[5, 2]",
        "flip": "float32[5, 2]", "down": "float32[5, 6]",
    }  # fmt: skip
    assert (now["0.act"]["x"], now["0.act"]["add"]) == ("float32[5, 4]", "float32[5, 2]")
    assert {name: now[name] for name in ("", "1", "1.act")} == {name: before[name] for name in ("", "1", "1.act")}
    assert program.model(X).shape == X.shape
    edit.undo()
    assert shapes_in(program) == before
    assert trace_of(program.model) == text
    assert program.graphs["0.act"] is program.graphs["1.act"]


def test_a_child_of_another_width_is_known_to_what_follows() -> None:
    program = fxopt.capture(Net(), (X,))
    edit = Edit(program, Site(program, "body.0", {}), "test_pass")
    edit.replace_module("up", nn.Linear(6, 3))
    edit.replace_module("down", nn.Linear(3, 6))
    edit.finish()
    now = shapes_in(program)
    assert [now[name][node] for name in ("body.0", "body.2") for node in ("up", "act", "down")] == [
        "float32[5, 3]", "float32[5, 3]", "float32[5, 6]", "float32[5, 8]", "float32[5, 8]", "float32[5, 6]",
    ]  # fmt: skip


def test_it_lands_whole_or_not_at_all() -> None:
    class Stops(PruneHidden):
        def rewrite(self, site: Site, edit: Edit) -> None:
            super().rewrite(site, edit)
            raise MatchFailure("the second module cannot be cut")

    program = fxopt.capture(Net().eval(), (X,))
    before = trace_of(program.model)
    manager = manager_of(program, time=False)
    manager.run([Stops()])
    assert {(d.status, d.reason) for d in manager.decisions} == {("refused", "the second module cannot be cut")}
    assert trace_of(program.model) == before


def test_tied_tensors_change_under_all_their_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) + self.two(x)

    @dataclass(frozen=True)
    class Cut(Pass):
        """Keep some results."""

        numerics: ClassVar[Numerics] = Numerics.SEMANTIC
        goal: ClassVar[Goal] = Goal.SIZE
        own_forward: ClassVar[OwnForward | None] = OwnForward.RIGHT

        def find(self, program: Program) -> Iterator[Site | Refusal]:
            yield Site(program, "" if self.whole else "one", {}, data={"kept": [0, 2]})

        whole: bool = True
        keeps_form: ClassVar[bool] = False

        def rewrite(self, site: Site, edit: Edit) -> None:
            name = "one.weight" if self.whole else "weight"
            step = Select(name, name, 0, tuple(site.data["kept"]), 6)
            edit.set_tensor(name, *step.forward([edit.owner.get_parameter(name)]), step)

    model = Tied()
    fast = optimized(model, Cut())
    assert statuses(fast) == [("applied", "")]
    assert fast.one.weight is fast.two.weight
    torch.testing.assert_close(fast(X), model(X)[:, [0, 2]])
    saved = quiet_state(fast)
    assert saved["one.weight"].shape == saved["two.weight"].shape == (6, 6)
    again = optimized(Tied(), Cut())
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(X), fast(X))
    refused = optimized(model, Cut(whole=False))
    assert "'one.weight' is tied to 'two.weight', outside the site" in statuses(refused)[0][1]


# -- what is refused -------------------------------------------------------------------------------------------------


def test_data_of_a_site_is_plain() -> None:
    program = fxopt.capture(Net(), (X,))
    assert Site(program, "", {}, data={"kept": (1, 2), "scale": 0.5}).data == {"kept": [1, 2], "scale": 0.5}
    for data, message in {
        "tensor": ({"kept": torch.arange(2)}, r"site data\['kept'\] is a Tensor, which a plan cannot store.*tolist"),
        "infinite": ({"scale": float("inf")}, r"site data\['scale'\] is inf"),
        "key": ({"a": {1: 2}}, r"site data\['a'\] has the key 1"),
    }.values():
        with pytest.raises(fxopt.UsageError, match=message):
            Site(program, "", {}, data=data)

    @dataclass(frozen=True)
    class KeepsTensors(Pass):
        """Put a tensor into the data."""

        def find(self, program: Program) -> Iterator[Site | Refusal]:
            yield Site(program, "", {}, data={"kept": torch.arange(2)})

    with pytest.raises(fxopt.UsageError, match=r"'keeps_tensors' \(find\): site data\['kept'\] is a Tensor"):
        optimized(Net(), KeepsTensors())


MISUSES: dict[str, tuple[Callable[[Edit], object], str]] = {
    "no tensor": (lambda e: e.set_tensor("up.gain", torch.ones(1), None), "'body.0.up.gain' is no parameter or buffer"),
    "same shape": (
        lambda e: e.set_tensor("up.bias", torch.ones(8), Select("up.bias", "up.bias", 0, tuple(range(8)), 8)),
        "could not be told apart",
    ),
    "no attribute": (lambda e: e.set_attribute("up", "gain", 1), "'body.0.up.gain' does not exist"),
    "a tensor": (lambda e: e.set_attribute("up", "weight", 1), "is a tensor or a module; use set_tensor"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_one_clear_line(misuse: str) -> None:
    program = fxopt.capture(Net(), (X,))
    act, message = MISUSES[misuse]
    with pytest.raises(MatchFailure, match=message):
        act(Edit(program, Site(program, "body.0", {}), "test_pass"))


# -- attributes that graphs were made for ----------------------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.layer = 2, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).view(len(x), self.heads, 3)
        return F.relu(y) if self.heads > 1 else y


@pytest.mark.parametrize("rewritten", [True, False])
def test_graphs_follow_an_attribute_or_go(rewritten: bool) -> None:
    model = Heads()
    program = fxopt.capture(model, (X,))
    edit = Edit(program, Site(program, "", {}), "test_pass")
    before = trace_of(program.model)
    with edit.watched():
        for name in ("layer.weight", "layer.bias"):
            step = Select(name, name, 0, (0, 1, 2), 6)
            edit.set_tensor(name, *step.forward([edit.owner.get_parameter(name)]), step)
        edit.set_attribute("", "heads", 1)
        if rewritten:
            for node in edit.graph.nodes:
                node.args = tuple(1 if type(arg) is int and arg == 2 else arg for arg in node.args)
        edit.finish()
    result = program.model(X)
    assert result.shape == (5, 1, 3)
    assert bool((result < 0).any()) is not rewritten  # the graph was made for several heads, and applies relu
    edit.undo()
    assert trace_of(program.model) == before
    assert torch.equal(program.model(X), model(X))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shape, self.scale = (6,), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x[..., : self.shape[0]], self.shape) * self.scale


def test_graphs_follow_an_attribute_that_is_guarded_by_its_text() -> None:
    program = fxopt.capture(Norm(), (X,))
    edit = Edit(program, Site(program, "", {}), "test_pass")
    with edit.watched():
        edit.set_attribute("", "shape", (3,))
        edit.set_attribute("", "scale", 0.0)
        for node in edit.graph.nodes:
            node.args = fx.node.map_aggregate(node.args, lambda arg: {6: 3, 2.0: 0.0}.get(arg, arg))
        edit.finish()
    assert select(program.model, (X,), {}) is not None
    assert program.model(X).shape == (5, 3)


def test_a_region_that_borrows_a_child_gets_the_new_one() -> None:
    model = Net()
    fast = optimized(model, [Checkpoint(), SwapActivations()])
    assert [type(child).__name__ for child in children_of(fast.body[0].part).values()].count("Rectifier") == 1
    assert type(fast.body[0].act).__name__ == "Rectifier"
    torch.testing.assert_close(fast(X), model(X))
