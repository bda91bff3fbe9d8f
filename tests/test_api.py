"""The public functions: what a user holds afterwards is still the user's own model."""

from __future__ import annotations

import copy
import io
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

import fxopt
from fxopt.api import optimize
from fxopt.passes import timing
from fxopt.passes.contract import Pass
from fxopt.passes.rewriting import Edit, operation
from fxopt.passes.sites import Goal, Numerics, Phase, Site
from fxopt.passes.timing import Timings
from fxopt.tracing.program import Program


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.outer = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


class Apart(nn.Module):
    """An ensemble whose members give different outputs: it is fused in evaluation only."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(4))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(x) for head in self.heads]


class Model(nn.Module):
    """An ensemble between modules of every kind that must survive."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.heads = nn.ModuleList(Head() for _ in range(4))
        self.last = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.last.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.layers = [self.last, self.tied]
        self.config = {"name": "model", "sizes": [1, 2]}
        self.scale = torch.full((3,), 2.0)
        self.log: list[str] = []
        self.last.register_forward_hook(self.note)

    def note(self, module: nn.Module, args: object, output: Tensor) -> None:
        self.log.append(type(module).__name__)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.scratch.add_(1)
        z = torch.stack([head(self.norm(x)) for head in self.heads]).mean(0)
        unused = z.exp()  # noqa: F841
        return self.layers[1](self.layers[0](z)) * self.scale + self.frozen(z)

    def predict(self, x: Tensor) -> Tensor:
        return self(x).argmax(-1)


X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
FUSE = "fuse_ensembles{lowering=bmm}"


def optimized(model: nn.Module, passes: object = FUSE, **options: object) -> nn.Module:
    return optimize(model, passes, **{"example_inputs": (X,), "measure": False, **options})


def outputs(model: nn.Module) -> list[Tensor]:
    """Return output, gradients of the input and what the call did to buffers."""
    x = X.clone().requires_grad_()
    y = model(x)
    y.sin().sum().backward()
    found = [y.detach(), x.grad, model.norm.running_mean.clone(), model.calls.clone()]
    model.zero_grad()
    return found


def assert_close(one: nn.Module, other: nn.Module) -> None:
    for given, expected in zip(outputs(one), outputs(other), strict=True):
        torch.testing.assert_close(given, expected)


def belongings(model: nn.Module) -> object:
    """Return everything about a model that must not change when it is only looked at."""
    modules = dict(model.named_modules())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return (
        {name: (id(module), type(module), module.training, list(vars(module))) for name, module in modules.items()},
        {name: (id(tensor), tensor.tolist(), tensor.requires_grad, tensor.grad) for name, tensor in tensors.items()},
        copy.deepcopy((model.config, model.log, model.scale.tolist())),
        [
            (id(hook), id(module._forward_hooks))
            for module in modules.values()
            for hook in module._forward_hooks.values()
        ],
        (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
    )


# -- the user's model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", [{}, {"verify": False}, {"example_inputs": None}, {"phase": "eval"}])
def test_the_model_given_is_left_alone(training: bool, options: dict[str, object]) -> None:
    model = Model().train(training)
    before = belongings(model)
    fast = optimized(model, "inference", **options)
    assert belongings(model) == before
    mine, theirs = ({id(tensor) for tensor in m.parameters()} for m in (fast, model))
    assert not mine & theirs
    assert fast.training is training


def test_measuring_leaves_it_alone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_candidates(candidates: dict[str, timing.Runner], **options: object) -> Timings:
        for run in candidates.values():
            with run.leaving_no_trace():
                run()
        return Timings([{name: 1.0 + (name == "before") for name in candidates}] * 20)

    monkeypatch.setattr(timing, "time_candidates", time_candidates)
    model = Model()
    before = belongings(model)
    fast = optimized(model, "fuse_ensembles", measure=True)
    assert belongings(model) == before
    assert [decision.status for decision in fxopt.plan(fast).decisions] == ["applied"]
    assert_close(fast, model)


@pytest.mark.parametrize(("wanted", "said"), [(True, False), ("cold", True)])
def test_lowerings_are_chosen_for_the_calls_that_the_user_names(
    wanted: object, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of hot calls one lowering is the fastest here, of cold ones another; plan and report say which it was."""

    def time_candidates(candidates: dict[str, timing.Runner], cold: bool, **options: object) -> Timings:
        fastest = "bmm" if cold else "grouped_conv"
        samples = {name: 1.0 + (name != fastest) + 2 * (name == "before") for name in candidates}
        return Timings([samples] * 20, cold=cold)

    monkeypatch.setattr(timing, "time_candidates", time_candidates)
    fast = optimized(Model(), "fuse_ensembles", measure=wanted)
    (decision,) = fxopt.plan(fast).decisions
    assert decision.choice == ("bmm" if said else "grouped_conv")
    assert decision.figures.get("cold", False) is said
    assert ("cold (caches emptied before each call)" in str(fxopt.report(fast))) is said
    again = fxopt.optimize(Model(), plan=fxopt.plan(fast), example_inputs=(X,))
    assert fxopt.plan(again).decisions[0].choice == decision.choice


def test_the_whole_model_says_that_its_calls_were_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_candidates(candidates: dict[str, timing.Runner], cold: bool, **options: object) -> Timings:
        samples = {name: 1.0 + (name == "before") for name in candidates}
        return Timings([samples] * 20, cold=cold)

    monkeypatch.setattr(timing, "time_candidates", time_candidates)
    two = nn.Sequential(Model(), nn.Linear(3, 5), Model())
    fast = optimized(two, "fuse_ensembles", measure="cold")
    timings = fxopt.report(fast).to_json()["timings"]
    assert len(fxopt.plan(fast).decisions) == 2 and timings["cold"]


def test_the_environment_says_that_calls_are_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOPT_MEASURE", "cold")
    fast = optimized(Model(), "fuse_ensembles", measure=None)
    assert all(decision.figures["cold"] for decision in fxopt.plan(fast).decisions)


@pytest.mark.parametrize("training", [False, True])
def test_the_result_is_the_same_kind_of_model(training: bool) -> None:
    model = Model().train(training)
    fast = optimized(model, "inference")
    assert isinstance(fast, Model) and type(fast).__name__ == "Model"
    assert fast.config == model.config and fast.config is not model.config
    assert fast.layers[0] is fast.last and fast.tied.weight is fast.last.weight
    assert len(fast.heads) == 4 and isinstance(fast.heads[0], Head)
    assert torch.equal(fast.predict(X), model.predict(X))
    fast.log.clear()
    fast(X)
    assert fast.log == ["Linear"]
    assert not any(parameter.requires_grad for parameter in fast.frozen.parameters())
    fast.load_state_dict(model.state_dict())
    assert_close(fast, model)


def test_in_place_everything_that_survives_keeps_its_identity() -> None:
    model, reference = Model(), Model()
    reference.load_state_dict(model.state_dict())
    modules, hooks = dict(model.named_modules()), model.last._forward_hooks
    parameters = {name: p for name, p in model.named_parameters() if not name.startswith("heads")}
    handle = model.norm.register_forward_hook(lambda module, args, output: output * 2)
    attributes = model.layers, model.config, model.scale
    fast = optimized(model, inplace=True)
    handle.remove()
    assert fast is model
    assert all(dict(model.named_modules())[name] is module for name, module in modules.items())
    assert all(dict(model.named_parameters())[name] is parameter for name, parameter in parameters.items())
    assert (model.layers, model.config, model.scale) == attributes and model.layers[0] is modules["last"]
    assert model.last._forward_hooks is hooks
    assert sorted(set(dict(model.named_parameters())) - set(parameters)) == [
        "heads_fused.inner.bias", "heads_fused.inner.weight", "heads_fused.outer.bias", "heads_fused.outer.weight",
    ]  # fmt: skip
    assert model.heads[1].inner.weight.data_ptr() == model.heads_fused.inner.weight[1].data_ptr()
    assert_close(model, reference)


@pytest.mark.parametrize("is_child", [False, True])
def test_a_graph_module_is_optimized_in_place(is_child: bool) -> None:
    """Torch makes a class for each of them, and for each copy."""
    traced = fx.symbolic_trace(nn.Sequential(nn.Conv1d(5, 4, 1), nn.BatchNorm1d(4)).eval())
    model = nn.Sequential(traced, nn.ReLU()).eval() if is_child else traced
    x = torch.randn(3, 5, 6)
    expected = model(x)
    fast = fxopt.optimize(model, "fold_batchnorm", example_inputs=(x,), measure=False, inplace=True)
    assert fast is model and (not is_child or model[0] is traced)
    assert [each.status for each in fxopt.plan(model).decisions] == ["applied"]
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(fxopt.restore(model)(x), expected)


def test_hooks_still_take_their_turn_after_optimizing_in_place() -> None:
    model = optimized(Model(), inplace=True)
    order: list[str] = []
    model.last.register_forward_hook(lambda *_: order.append("last"))
    model.last.register_forward_hook(lambda *_: order.append("first"), prepend=True)
    model.heads_fused.register_forward_pre_hook(lambda *_: None, prepend=True)
    model(X)
    assert order == ["first", "last"]


def _raise(graph_module: fx.GraphModule) -> fx.GraphModule:
    raise RuntimeError("no")


@pytest.mark.parametrize("inplace", [False, True])
def test_what_raises_leaves_the_model_alone(inplace: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOPT_REPRODUCER_DIR", str(tmp_path))
    model, wrong = Model(), torch.randn(6, 4)
    before = belongings(model)
    with pytest.raises(fxopt.PassError):
        optimized(model, [FUSE, _raise], inplace=inplace)
    with pytest.raises(fxopt.InputError):
        optimized(model, example_inputs=(wrong,), inplace=inplace)
    assert belongings(model) == before


# -- phases and seeds ----------------------------------------------------------------------------------------------


def test_the_phase_is_the_model_s_own_unless_given() -> None:
    for training in (True, False):
        model = Model().train(training)
        assert fxopt.plan(optimized(model)).phase == ("train" if training else "eval")
        for phase, expected in (("train", "train"), ("inference", "eval"), (Phase.TRAIN, "train"), ("eval", "eval")):
            fast = optimized(model, phase=phase)
            assert fxopt.plan(fast).phase == expected
            assert fast.training is training


def test_a_rewrite_for_evaluation_does_not_land_on_a_model_in_training_and_keeps_one_in_evaluation_there() -> None:
    model = Apart().train()
    refused = optimized(model, phase="eval")
    assert refused.training and all(module.training for module in refused.modules())
    assert [d.reason for d in fxopt.plan(refused).decisions if "evaluation" in d.reason] == [
        "it is for evaluation, and the model is in training; call model.eval() first"
    ]
    fast = optimized(model.eval())
    torch.testing.assert_close(fast(X), model(X))
    with pytest.raises(fxopt.ModeError, match="fuse_ensembles"):
        fast.train()
    fast.eval()
    refused = optimized(model.train())
    assert "different outputs" in fxopt.plan(refused).decisions[0].reason
    assert refused.train().training


@dataclass(frozen=True)
class Counted(Pass):
    """Count the threads that look at the same time."""

    goal: ClassVar[Goal] = Goal.SIZE
    inside: ClassVar[list[int]] = []
    most: ClassVar[list[int]] = []

    def find(self, program: Program) -> Iterator[Site]:
        self.inside.append(1)
        time.sleep(0.1)
        self.most.append(len(self.inside))
        self.inside.pop()
        return iter(())


def test_threads_optimize_one_after_another() -> None:
    models: list[nn.Module] = []
    calls = [threading.Thread(target=lambda: models.append(optimized(Plain(), Counted()))) for _ in range(3)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert len(models) == 3 and set(Counted.most) == {1}
    assert torch.get_default_dtype() == torch.float32


@dataclass(frozen=True)
class Noisy(Pass):
    """Draw random numbers while looking and while rewriting."""

    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: Program) -> Iterator[Site]:
        torch.rand(3), random.random(), np.random.rand()
        for match in program.matches(operation("tanh", name="tanh")):
            yield match.site()

    def rewrite(self, site: Site, edit: Edit) -> None:
        torch.rand(3), random.random(), np.random.rand()
        node = edit.graph_node("tanh")
        edit.replace(node, edit.call(torch.tanh, node.args[0]))


def test_random_state_is_kept_whatever_passes_draw() -> None:
    model = Model()
    before = belongings(model)
    optimized(model, Noisy())
    assert belongings(model) == before


def test_the_seed_decides_what_verification_draws() -> None:
    model = Model()
    first, second, other = (optimized(model, seed=seed) for seed in (3, 3, 4))
    assert fxopt.plan(first) == fxopt.plan(second) != fxopt.plan(other)


# -- again ---------------------------------------------------------------------------------------------------------


def test_optimizing_again_adds_up() -> None:
    model = Model().eval()
    once = optimized(model)
    twice = optimized(once, "eliminate_dead_code,eliminate_common_subexpressions")
    assert twice is not once
    assert fxopt.plan(twice).pipeline == (FUSE, "eliminate_dead_code", "eliminate_common_subexpressions")
    applied = [decision for decision in fxopt.plan(twice).decisions if decision.status == "applied"]
    assert [(decision.step, decision.pass_name) for decision in applied] == [
        (0, "fuse_ensembles"),
        (1, "eliminate_dead_code"),
    ]
    assert list(fxopt.state_dict(twice)) == list(model.state_dict())
    assert_close(twice, model)
    assert "exp" in str(fxopt.graphs(once)[""]) and "exp" not in str(fxopt.graphs(twice)[""])
    assert type(fxopt.restore(twice)) is Model
    fxopt.load_state_dict(twice, Model().state_dict())
    for again in (optimized(model, list(fxopt.plan(twice).pipeline), plan=fxopt.plan(twice)),):
        code = [
            {name: graph.python_code("self").src for name, graph in fxopt.graphs(m).items()} for m in (again, twice)
        ]
        assert code[0] == code[1]


def test_optimizing_again_in_place_keeps_what_is_fused() -> None:
    model = optimized(Model(), inplace=True)
    store = model.heads_fused
    again = optimized(model, "eliminate_dead_code", inplace=True)
    assert again is model and model.heads_fused is store
    assert len(fxopt.plan(model).pipeline) == 2
    original = fxopt.restore(model)
    assert_close(model, original)


def test_a_second_pass_of_the_same_finds_nothing() -> None:
    once = optimized(Model())
    twice = optimized(once)
    assert [decision.step for decision in fxopt.plan(twice).decisions if decision.status == "applied"] == [0]
    assert {name: str(graph) for name, graph in fxopt.graphs(twice).items()} == {
        name: str(graph) for name, graph in fxopt.graphs(once).items()
    }


def test_plans_come_from_files_too(tmp_path: Path) -> None:
    model = Model()
    fast = optimized(model)
    fxopt.plan(fast).save(tmp_path / "plan.json")
    again = fxopt.optimize(model, FUSE, plan=tmp_path / "plan.json")
    assert fxopt.plan(again).decisions == fxopt.plan(fast).decisions
    assert_close(again, fast)


# -- restoring -----------------------------------------------------------------------------------------------------


def test_restoring_gives_the_original_back() -> None:
    model = Model()
    original = fxopt.restore(optimized(model, "inference"))
    assert type(original) is Model
    assert list(original.state_dict()) == list(model.state_dict())
    assert [name for name, _ in original.named_modules()] == [name for name, _ in model.named_modules()]
    assert {n: p.requires_grad for n, p in original.named_parameters()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }
    assert original.tied.weight is original.last.weight and original.layers[1] is original.tied
    assert all(type(one) is type(other) for one, other in zip(original.modules(), model.modules(), strict=True))
    assert_close(original, model)


def test_restoring_takes_the_present_state() -> None:
    fast = optimized(Model())
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
    fast(X).sum().backward()
    optimizer.step()
    fast.config["sizes"].append(3)
    fast.scale = torch.full((3,), 3.0)
    fast.frozen.requires_grad_(True)
    fast.heads_fused.requires_grad_(False)
    fast.loss = fast(X).sum()
    fast.heads[2].comment = "mine"
    fast.norm.eval()
    fast.norm.register_forward_hook(fast.note)
    original = fxopt.restore(fast)
    assert original.config["sizes"] == [1, 2, 3] and original.config is not fast.config
    assert torch.equal(original.loss, fast.loss) and original.heads[2].comment == "mine"
    assert [m.training for m in original.modules()] == [
        m.training for name, m in fast.named_modules() if "fused" not in name
    ]
    assert torch.equal(original.scratch, fast.scratch) and torch.equal(original.calls, fast.calls)
    assert {n.split(".")[0] for n, p in original.named_parameters() if not p.requires_grad} == {"heads"}
    original.log.clear(), fast.log.clear()
    torch.testing.assert_close(original(X), fast(X))
    assert original.log == fast.log == ["BatchNorm1d"] * 4 + ["Linear"]
    assert not {tensor.data_ptr() for tensor in original.state_dict().values()} & {
        tensor.data_ptr() for tensor in fast.state_dict().values()
    }


def test_restoring_leaves_out_what_passes_added() -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.arange(5) * 2

    fast = optimized(Constant(), "fold_constants")
    added = {name for name, value in vars(fast).items() if isinstance(value, Tensor)}
    assert added and not added & set(vars(fxopt.restore(fast)))


# -- copies and checkpoints ----------------------------------------------------------------------------------------


def _through_torch(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _through_torch])
def test_copies_keep_plan_report_and_state(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    fast = optimized(Model(), "inference")
    twin = duplicate(fast)
    assert_close(twin, fast)
    assert fxopt.plan(twin) == fxopt.plan(fast)
    assert str(fxopt.report(twin)) == str(fxopt.report(fast))
    assert list(fxopt.state_dict(twin)) == list(fxopt.state_dict(fast))
    with torch.no_grad():
        twin.heads[0].inner.weight.fill_(7)
    assert twin.heads_fused.inner.weight[0].eq(7).all() and not fast.heads_fused.inner.weight[0].eq(7).any()
    assert fxopt.restore(twin).heads[0].inner.weight.eq(7).all()
    twin.load_state_dict(Model().state_dict())


def test_old_checkpoints_load_into_a_part_of_a_bigger_model() -> None:
    class Bigger(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part
            self.more = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.more(self.part(x))

    old = Bigger(Model())
    new = Bigger(optimized(Model()))
    assert new.load_state_dict(old.state_dict()) == ([], [])
    torch.testing.assert_close(new.eval()(X), old.eval()(X))
    part = {name: tensor for name, tensor in old.state_dict().items() if not name.endswith("heads.2.inner.weight")}
    assert new.load_state_dict(part, strict=False).missing_keys == ["part.heads.2.inner.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*part.heads.2.inner.weight"):
        new.load_state_dict(part)
    whole = optimized(old, phase="eval")
    assert whole.load_state_dict(old.state_dict()) == ([], [])


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_go_both_ways(assign: bool) -> None:
    model, fast = Model(), optimized(Model())
    assert fxopt.load_state_dict(fast, copy.deepcopy(model.state_dict()), assign=assign) == ([], [])
    assert_close(fast, model)
    other = Model()
    assert other.load_state_dict(fxopt.state_dict(fast)) == ([], [])
    assert_close(other, fast)
    assert fast.load_state_dict(fast.state_dict()) == ([], [])


@pytest.mark.parametrize("cast", [nn.Module.double, nn.Module.half, lambda m: m.to(torch.bfloat16)])
def test_casting_reaches_everything(cast: Callable[[nn.Module], nn.Module]) -> None:
    model = Model().eval()
    model.scale = 2.0
    fast = cast(optimized(model))
    dtype = fast.heads_fused.inner.weight.dtype
    assert {parameter.dtype for parameter in fast.parameters()} == {dtype} != {torch.float32}
    given, expected = fast(X.to(dtype)), cast(model)(X.to(dtype))
    torch.testing.assert_close(given, expected, atol=3e-2, rtol=3e-2)
    assert {tensor.dtype for tensor in fxopt.restore(fast).parameters()} == {dtype}
    assert {t.dtype for t in fxopt.state_dict(fast).values() if t.is_floating_point()} == {dtype}


class Pure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


@pytest.mark.parametrize("lowering", ["wide", "wide_input_first", "bmm", "grouped_conv"])
def test_fused_models_compile_whole_and_export(lowering: str) -> None:
    fast = optimized(Pure(), f"fuse_ensembles{{lowering={lowering}}}")
    compiled = torch.compile(fast, fullgraph=True, backend="eager")
    for batch in (6, 2):
        torch.testing.assert_close(compiled(X[:batch]), fast(X[:batch]))
    exported = torch.export.export(fast, (X,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    torch.testing.assert_close(exported.module()(X[:3]), fast(X[:3]))


# -- what a pass may be --------------------------------------------------------------------------------------------


def rename_nothing(graph_module: fx.GraphModule) -> fx.GraphModule:
    return graph_module


def negate(graph_module: fx.GraphModule) -> fx.GraphModule:
    output = graph_module.graph.output_node()
    with graph_module.graph.inserting_before(output):
        output.args = (graph_module.graph.call_function(torch.neg, output.args),)
    return graph_module


def negate_twice(graph_module: fx.GraphModule) -> fx.GraphModule:
    return negate(negate(graph_module))


def other_activation(graph_module: fx.GraphModule) -> fx.GraphModule:
    graph_module.act = nn.GELU()
    return graph_module


def same_activation(graph_module: fx.GraphModule) -> fx.GraphModule:
    graph_module.act = nn.ReLU()
    return graph_module


def other_weights(graph_module: fx.GraphModule) -> fx.GraphModule:
    graph_module.a = nn.Linear(5, 6)
    return graph_module


def add_module(graph_module: fx.GraphModule) -> fx.GraphModule:
    graph_module.add_submodule("extra", nn.Identity())
    graph_module.register_buffer("zero", torch.zeros(3))
    output = graph_module.graph.output_node()
    with graph_module.graph.inserting_before(output):
        extra = graph_module.graph.call_module("extra", output.args)
        zero = graph_module.graph.get_attr("zero")
        output.args = (graph_module.graph.call_function(torch.add, (extra, zero)),)
    return graph_module


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 6)
        self.act = nn.ReLU()
        self.b = nn.Linear(6, 3)
        self.register_buffer("k", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x))) + self.k


FUNCTIONS = {
    rename_nothing: ("applied", ""),
    negate_twice: ("applied", ""),
    same_activation: ("applied", ""),
    add_module: ("applied", ""),
    negate: ("undone", "output differs"),
    other_activation: ("undone", "output differs"),
    other_weights: ("refused", "it replaces 'a'"),
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functions_are_passes(function: Callable[[fx.GraphModule], fx.GraphModule]) -> None:
    model = Plain()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fast = optimized(model, function)
    [decision] = fxopt.plan(fast).decisions
    status, reason = FUNCTIONS[function]
    assert (decision.pass_name, decision.status) == (function.__name__, status)
    assert decision.reason.startswith(reason)
    torch.testing.assert_close(fast(X), model(X))
    assert list(fast.state_dict()) == list(state)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())
    torch.testing.assert_close(fast.double()(X.double()), model.double()(X.double()))
    torch.testing.assert_close(fxopt.restore(fast)(X.double()), model(X.double()))


def returns_none(graph_module: fx.GraphModule) -> None:
    graph_module.graph.erase_node(graph_module.graph.output_node())


def returns_text(graph_module: fx.GraphModule) -> str:
    return graph_module.code


def scales_weights(graph_module: fx.GraphModule) -> fx.GraphModule:
    with torch.no_grad():
        graph_module.a.weight.mul_(2)
    return graph_module


def scales_data(graph_module: fx.GraphModule) -> fx.GraphModule:
    graph_module.a.weight.data.mul_(2)
    return graph_module


def clears_buffer(graph_module: fx.GraphModule) -> fx.GraphModule:
    graph_module.k.zero_()
    return graph_module


def changes_settings(graph_module: fx.GraphModule) -> fx.GraphModule:
    graph_module.a.in_features = 3
    return graph_module


def calls_nothing(graph_module: fx.GraphModule) -> fx.GraphModule:
    next(iter(graph_module.graph.find_nodes(op="call_module"))).target = "nowhere"
    return graph_module


def takes_more(graph_module: fx.GraphModule) -> fx.GraphModule:
    with graph_module.graph.inserting_before(next(iter(graph_module.graph.nodes))):
        graph_module.graph.placeholder("more")
    return graph_module


FAILING = {
    returns_none: "returned NoneType; a pass function returns a torch.fx.GraphModule",
    returns_text: "returned str; a pass function returns a torch.fx.GraphModule",
    _raise: "raised RuntimeError: no",
    scales_weights: "it wrote into 'a.weight'",
    scales_data: "it wrote into 'a.weight'",
    clears_buffer: "it wrote into 'k'",
    changes_settings: "it set the attribute 'a.in_features'",
    calls_nothing: "its graph refers to 'nowhere', which does not exist",
    takes_more: "its inputs changed from x to more, x",
}


@pytest.mark.parametrize("function", FAILING, ids=lambda function: function.__name__)
def test_functions_that_fail_are_named(
    function: Callable[[fx.GraphModule], fx.GraphModule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXOPT_REPRODUCER_DIR", str(tmp_path))
    model = Plain()
    before = {name: (id(tensor), tensor.tolist()) for name, tensor in model.state_dict(keep_vars=True).items()}
    with pytest.raises(fxopt.PassError, match=f"pass '{function.__name__}'.*{FAILING[function]}"):
        optimized(model, function, verify=False)
    assert {n: (id(t), t.tolist()) for n, t in model.state_dict(keep_vars=True).items()} == before


def test_passes_come_in_every_form() -> None:
    @dataclass(frozen=True)
    class Keep(Pass):
        numerics: ClassVar[Numerics] = Numerics.EXACT

        def find(self, program: Program) -> Iterator[Site]:
            return iter(())

    class Bare(Pass):
        def find(self, program: Program) -> Iterator[Site]:
            return iter(())

    forms = ["eliminate_dead_code, fold_constants{limit=8}", Keep(), Keep, Bare(), rename_nothing]
    fast = optimized(Plain(), forms)
    assert fxopt.plan(fast).pipeline == (
        "eliminate_dead_code", "fold_constants{limit=8}", "keep", "keep", "bare", "rename_nothing",
    )  # fmt: skip
    for one in (*forms, "inference", []):
        optimized(Plain(), one)


def test_only_optimized_models_have_a_record() -> None:
    fast = optimized(Model())
    for function in (fxopt.report, fxopt.graphs, fxopt.plan, fxopt.state_dict, fxopt.restore):
        with pytest.raises(fxopt.StateError, match="this Model was not optimized by fxopt"):
            function(Model())
        with pytest.raises(fxopt.StateError, match="this Head was not optimized by fxopt"):
            function(fast.heads[0])


def test_every_pass_is_listed_with_its_contract() -> None:
    passes = fxopt.list_passes()
    assert {"fuse_ensembles", "eliminate_dead_code"} <= set(passes)


def test_capturing_copies() -> None:
    model = Model()
    before = belongings(model)
    program = fxopt.capture(model, (X,))
    assert belongings(model) == before
    assert "" in program.graphs and "100%" in program.coverage().text
    assert_close(program.model, model)


def _exported(model: nn.Module, x: Tensor) -> nn.Module:
    return torch.export.export(model, (x,)).module()


@pytest.mark.parametrize("made", [lambda model, _: fx.symbolic_trace(model), _exported], ids=["fx", "export"])
def test_a_graph_module_is_optimized_copied_and_restored_as_any_other(made: Callable[..., nn.Module]) -> None:
    x = torch.randn(4, 5)
    model = made(Heads().eval(), x)
    expected = model(x)
    fast = fxopt.optimize(model, "fuse_ensembles{lowering=bmm}", example_inputs=(x,), measure=False)
    assert isinstance(fast, fx.GraphModule)
    assert len(list(fast.parameters())) < len(list(model.parameters()))
    copied = copy.deepcopy(fast)
    for one in (fast, copied, fxopt.restore(fast), model):
        torch.testing.assert_close(one(x), expected)
    with torch.no_grad():
        copied.get_parameter(next(iter(dict(copied.named_parameters())))).add_(1.0)
    assert not torch.allclose(copied(x), expected)
    torch.testing.assert_close(fast(x), expected)
    with pytest.raises(pickle.PicklingError, match=r"torch.fx.GraphModule cannot be pickled; use fxopt.save"):
        pickle.dumps(fast)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads]).sum(0)
