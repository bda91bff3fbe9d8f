"""Bad input is handled, or refused by name, with what to do next; never does it change the user's model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.errors import MatchFailure
from fxopt.passes.contract import Pass
from fxopt.passes.rewriting import Edit
from fxopt.passes.sites import Phase, Site
from fxopt.tracing.program import Program


def head() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


class Ensemble(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.heads = nn.ModuleList(head() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        outputs = [h(x) for h in self.heads]
        return torch.stack(outputs).mean(0) if outputs else x


X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
FUSE = "fuse_ensembles{lowering=bmm}"


def optimized(model: nn.Module, passes: object = FUSE, **options: object) -> nn.Module:
    return fxopt.optimize(model, passes, **{"example_inputs": (X,), "measure": False, **options})


# -- pipelines -----------------------------------------------------------------------------------------------------

PIPELINES = {
    "fuse_ensemble": ("unknown pass 'fuse_ensemble'; did you mean 'fuse_ensembles'?", "fuse_ensemble"),
    "eliminate_dead_code,fold_constant": (
        "unknown pass 'fold_constant'; did you mean 'fold_constants'?",
        "fold_constant",
    ),
    "fuse_ensembles{lowerin=bmm}": ("has no option 'lowerin'; did you mean 'lowering'?", "lowerin"),
    "fuse_ensembles{lowering=bm}": ("did you mean 'bmm'?", "bm"),
    "fold_constants{limit=many}": ("limit", "many"),
    "fuse_ensembles{lowering=bmm": ("", ""),
    "fuse_ensembles,,fold_constants": ("", ""),
}


@pytest.mark.parametrize("text", PIPELINES)
def test_wrong_pipelines_show_the_place_and_the_nearest_name(text: str) -> None:
    message, span = PIPELINES[text]
    with pytest.raises(fxopt.PipelineError) as caught:
        optimized(Ensemble(), text)
    error = caught.value
    assert message in str(error)
    assert error.text == text and text in str(error)
    assert not span or error.text[error.start : error.end] == span
    caret = str(error).splitlines()[-1]
    assert caret.strip("^ ") == "" and caret.index("^") - 2 == error.start
    assert error.exit_code == 2


@pytest.mark.parametrize("passes", [3, [None], [("fuse_ensembles",)], {"a": 1}.items(), Ensemble, Ensemble(1)])
def test_what_is_no_pass_is_refused(passes: object) -> None:
    with pytest.raises(fxopt.UsageError, match="a pass is a name, a pass value or a function, not"):
        optimized(Ensemble(), passes)


@dataclass(frozen=True)
class First(Pass):
    before: ClassVar[tuple[str, ...]] = ("second",)

    def find(self, program: Program) -> Iterator[Site]:
        return iter(())


@dataclass(frozen=True)
class Second(Pass):
    requires: ClassVar[tuple[str, ...]] = ("first",)
    destroys: ClassVar[dict[str, str]] = {"third": "it would undo the second"}

    def find(self, program: Program) -> Iterator[Site]:
        return iter(())


@dataclass(frozen=True)
class Third(Pass):
    after: ClassVar[tuple[str, ...]] = ("fourth",)

    def find(self, program: Program) -> Iterator[Site]:
        return iter(())


@pytest.mark.parametrize(
    ("passes", "words"),
    [
        ([Second(), First()], ("second", "first")),
        ([Second()], ("second", "first")),
        ([First(), Second(), Third()], ("second", "third", "it would undo the second")),
    ],
)
def test_impossible_orders_say_which_two_and_why(passes: list[Pass], words: tuple[str, ...]) -> None:
    with pytest.raises(fxopt.OrderError) as caught:
        optimized(Ensemble(), passes)
    assert all(word in str(caught.value) for word in words)
    assert caught.value.exit_code == 2


def test_possible_orders_pass() -> None:
    optimized(Ensemble(), [First(), Second()])
    optimized(Ensemble(), [Third(), First()])


@pytest.mark.parametrize(
    "passes",
    [X, (X,), [X], [(X,)], {"x": X}, fxopt.Inputs(X), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X))],
)
def test_inputs_in_the_place_of_passes_are_recognized_and_not_shown(passes: object) -> None:
    with pytest.raises(fxopt.UsageError, match=r"give it by name: optimize\(model, example_inputs=") as caught:
        fxopt.optimize(Ensemble(), passes)
    assert "tensor(" not in str(caught.value) and "\n" not in str(caught.value)


# -- inputs --------------------------------------------------------------------------------------------------------


def test_inputs_that_the_model_refuses() -> None:
    with pytest.raises(fxopt.InputError, match=r"module 'heads.0.0' \(Linear\) raised RuntimeError") as caught:
        optimized(Ensemble(), example_inputs=(torch.randn(6, 4),))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "mat1 and mat2 shapes cannot be multiplied" in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("inputs", "words"), [((), "missing 1 required positional"), ({"y": X}, "unexpected keyword"), ((X, X), "takes 2")]
)
def test_inputs_that_do_not_fit_the_signature(inputs: object, words: str) -> None:
    with pytest.raises(fxopt.InputError, match=words):
        optimized(Ensemble(), example_inputs=inputs)


def test_a_second_call_that_fails_is_found_too() -> None:
    with pytest.raises(fxopt.InputError, match=r"'heads.0.0'"):
        optimized(Ensemble(), example_inputs=[(X,), (torch.randn(1),)])


@pytest.mark.parametrize("inputs", ["text", 3, [], {1: X}, [[X]], {X}, X.numpy()])
def test_wrong_forms_of_example_inputs(inputs: object) -> None:
    with pytest.raises(fxopt.UsageError, match=r"example_inputs"):
        optimized(Ensemble(), example_inputs=inputs)


@pytest.mark.parametrize(
    "inputs", [(X,), [(X,)], [(X,), (X[:2],)], {"x": X}, fxopt.Inputs(X), [fxopt.Inputs(x=X)], X, [X, X[:2]], None]
)
def test_right_forms_of_example_inputs(inputs: object) -> None:
    model = Ensemble()
    torch.testing.assert_close(optimized(model, example_inputs=inputs)(X), model(X))


@pytest.mark.parametrize("phase", ["training mode", "", "both", 1, True, Phase.BOTH])
def test_unknown_phases(phase: object) -> None:
    with pytest.raises(fxopt.UsageError, match="use 'train', 'eval', or None"):
        optimized(Ensemble(), phase=phase)


WRONG = [None, 3, b"x", [1], object(), nn.Linear, X]


def calls_with(model: nn.Module, wrong: object) -> dict[str, Callable[[], object]]:
    """Return public functions, each with one argument of a wrong type."""
    return {
        "report": lambda: fxopt.report(wrong),
        "graphs": lambda: fxopt.graphs(wrong),
        "plan": lambda: fxopt.plan(wrong),
        "state_dict": lambda: fxopt.state_dict(wrong),
        "restore": lambda: fxopt.restore(wrong),
        "load_state_dict of": lambda: fxopt.load_state_dict(wrong, {}),
        "load_state_dict from": lambda: fxopt.load_state_dict(model, wrong),
        "translate_state": lambda: fxopt.translate_state(wrong, model),
        "translate_state for": lambda: fxopt.translate_state({}, wrong),
        "translate_optimizer": lambda: fxopt.translate_optimizer(wrong, model),
        "translate_optimizer for": lambda: fxopt.translate_optimizer(torch.optim.SGD(model.parameters()), wrong),
        "save": lambda: fxopt.save(wrong, "never"),
        "save to": lambda: fxopt.save(model, wrong),
        "export": lambda: fxopt.export(wrong, "never", X),
        "export to": lambda: fxopt.export(model, wrong, X),
        "load": lambda: fxopt.load(wrong),
        "recording": lambda: fxopt.recording(wrong).__enter__(),
        "capture": lambda: fxopt.capture(wrong),
        "Plan.load": lambda: fxopt.Plan.load(wrong),
        "Plan.save": lambda: fxopt.plan(model).save(wrong),
        "register_operator": lambda: fxopt.register_operator(wrong),
        "operation": lambda: fxopt.operation(wrong),
    }


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: type(wrong).__name__)
def test_arguments_of_wrong_types_get_one_line(wrong: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, call in calls_with(optimized(Ensemble()), wrong).items():
        with pytest.raises(fxopt.FxoptError) as caught:
            call()
        assert "\n" not in str(caught.value) and "tensor(" not in str(caught.value), name
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda model: fxopt.save(model, "never", factory=3), "factory is of type int; give 'package.module:function'"),
        (lambda model: fxopt.load("never", model=3), "model is of type int; give the unoptimized torch.nn.Module"),
        (lambda model: fxopt.load("never", trust=3), "trust is of type int; give names of packages, or True"),
        (lambda model: fxopt.module("Linear"), "module_type is of type str; give a class of modules"),
        (lambda model: fxopt.optimize(model, phase=X), "phase of type Tensor; use 'train'"),
        (lambda model: fxopt.optimize(model, phase=["train"]), "phase of type list; use 'train'"),
    ],
)
def test_options_of_wrong_types_say_what_to_give(call: Callable[[nn.Module], object], words: str) -> None:
    with pytest.raises(fxopt.UsageError) as caught:
        call(optimized(Ensemble()))
    assert words in str(caught.value) and "\n" not in str(caught.value)


# -- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, "model", Ensemble, lambda x: x, torch.zeros(3), [head()]])
def test_what_is_no_module(model: object) -> None:
    with pytest.raises(fxopt.UsageError, match=r"expected a torch.nn.Module, got"):
        optimized(model)
    with pytest.raises(fxopt.StateError, match=r"was not optimized by fxopt"):
        fxopt.restore(model)


def test_lazy_parameters_are_refused_until_they_have_shapes() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.LazyLinear(3))
    with pytest.raises(fxopt.InputError, match=r"'1.weight' is lazy.*call the model once") as caught:
        optimized(model)
    assert caught.value.exit_code == 3
    model(X)
    optimized(model)


class Uncopyable(Ensemble):
    def __init__(self) -> None:
        super().__init__()
        self.lock = (number for number in range(3))


def test_models_that_cannot_be_copied_say_so() -> None:
    with pytest.raises(fxopt.InputError, match=r"cannot be copied \(TypeError: cannot pickle 'generator' object\)"):
        optimized(Uncopyable())


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("inputs", [(X,), None])
def test_no_member_or_one(count: int, inputs: object) -> None:
    model = Ensemble(count)
    fast = optimized(model, example_inputs=inputs)
    assert fxopt.plan(fast).decisions == ()
    assert torch.equal(fast(X), model(X))


def test_members_that_share_a_module() -> None:
    model = Ensemble()
    model.heads[3] = model.heads[1]
    model.heads[2][0] = model.heads[0][0]
    fast = optimized(model)
    torch.testing.assert_close(fast(X), model(X))
    assert fast.heads[3] is fast.heads[1] and fast.heads[2][0] is fast.heads[0][0]
    assert any("is tied to" in decision.reason for decision in fxopt.plan(fast).decisions)
    assert list(fxopt.state_dict(fast)) == list(model.state_dict())


def test_members_that_are_all_one_module() -> None:
    model = Ensemble(1)
    model.heads.extend([model.heads[0]] * 3)
    fast = optimized(model)
    torch.testing.assert_close(fast(X), model(X))
    assert fxopt.plan(fast).decisions == ()
    assert fast.heads[3] is fast.heads[0]


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([h(x) for h in self.heads])


def test_half_in_training_half_in_evaluation() -> None:
    model = WithDropout().eval()
    model.heads[1].train()
    model.heads[2][1].train()
    flags = [module.training for module in model.modules()]
    fast = optimized(model)
    assert [module.training for module in model.modules()] == flags
    assert [fast.get_submodule(name).training for name, _ in model.named_modules()] == flags
    given, expected = fast(X), model(X)
    for index in (0, 3):
        torch.testing.assert_close(given[index], expected[index])
    for index in (1, 2):
        assert not torch.equal(given[index], fast(X)[index])
    torch.testing.assert_close(fast.eval()(X), model.eval()(X))


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Ensemble()
    fast = optimized(model, "inference", measure=True)
    [decision] = fxopt.plan(fast).decisions
    assert (decision.status, decision.figures) == ("applied", {"checked": "unverified: meta"})
    assert fast(X.to("meta")).shape == (6, 3)
    real = Ensemble()
    fast = fast.to_empty(device="cpu")
    assert fast.load_state_dict(real.state_dict()) == ([], [])
    torch.testing.assert_close(fast(X), real(X))
    assert fxopt.restore(optimized(model)).heads[0][0].weight.is_meta


# -- passes that fail ----------------------------------------------------------------------------------------------

MODULE = '''
"""A model and passes that fail, as a user may have them."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fxopt.passes.contract import Pass
from fxopt.passes.sites import Site


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x):
        return self.linear(x).relu()


class Failing(Pass):
    def find(self, program):
        yield Site(program, "", {})


@dataclass(frozen=True)
class Raises(Failing):
    message: str = "no"

    def rewrite(self, site, edit):
        edit.erase(edit.call(torch.sin, next(iter(edit.graph.nodes))))
        raise ValueError(self.message)


@dataclass(frozen=True)
class Hangs(Failing):
    def rewrite(self, site, edit):
        time.sleep(60)


@dataclass(frozen=True)
class Nonsense(Failing):
    def rewrite(self, site, edit):
        edit.set_graph(torch.fx.Graph())


@dataclass(frozen=True)
class NotASite(Pass):
    def find(self, program):
        yield "here"


def function(graph_module):
    return None
'''

FAILURES = {
    "Raises(message='why')": r"pass 'raises' \(site \(root\)\) raised ValueError: why",
    "Hangs()": r"pass 'hangs' \(site \(root\)\) took longer than 0.2 s",
    "Nonsense()": r"pass 'nonsense' \(site \(root\)\): the rewritten graph is malformed",
    "NotASite()": r"pass 'not_a_site': find yielded str, expected a Site or a Refusal",
    "function": r"pass 'function' \(site \(root\)\): returned NoneType",
}


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Import the module above from a folder of its own."""
    import importlib

    (tmp_path / "users_own.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FXOPT_REPRODUCER_DIR", str(tmp_path / "reproducers"))
    monkeypatch.setenv("FXOPT_PASS_TIMEOUT", "0.2")
    yield importlib.import_module("users_own")
    del sys.modules["users_own"]


@pytest.mark.parametrize("expression", FAILURES)
def test_failing_passes_are_named_undone_and_can_be_replayed(
    user_module: object, expression: str, tmp_path: Path
) -> None:
    model = user_module.Model()
    before = {name: (id(tensor), tensor.tolist()) for name, tensor in model.state_dict(keep_vars=True).items()}
    attributes = {name: (id(module), type(module), list(vars(module))) for name, module in model.named_modules()}
    with pytest.raises(fxopt.PassError, match=FAILURES[expression]) as caught:
        optimized(model, [FUSE, eval(expression, vars(user_module))])
    assert {n: (id(t), t.tolist()) for n, t in model.state_dict(keep_vars=True).items()} == before
    assert {n: (id(m), type(m), list(vars(m))) for n, m in model.named_modules()} == attributes
    script = Path(caught.value.reproducer)
    assert script.is_relative_to(tmp_path) and script.name == "reproduce.py"
    assert any(str(script) in note for note in caught.value.__notes__)
    if expression.startswith(
        ("Raises", "function")
    ):  # one pass and one function; the others differ in the message only
        _replays(script, str(caught.value))


def _replays(script: Path, message: str) -> None:
    finished = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd="/", env={**os.environ}
    )
    assert finished.returncode == 1
    assert f"PassError: {message}\n" in finished.stderr


def test_a_reproducer_of_what_cannot_be_saved_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOPT_REPRODUCER_DIR", str(tmp_path))

    def local(graph_module: torch.fx.GraphModule) -> None:
        return None

    with pytest.raises(fxopt.PassError) as caught:
        optimized(Ensemble(), local)
    assert caught.value.reproducer is None
    assert any("no reproducer could be written" in note for note in caught.value.__notes__)


def test_a_reproducer_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FXOPT_REPRODUCER_DIR", str(tmp_path / "file"))
    with pytest.raises(fxopt.PassError, match="find yielded") as caught:
        optimized(Ensemble(), NotASite())
    assert caught.value.reproducer is None


@dataclass(frozen=True)
class NotASite(Pass):
    def find(self, program: Program) -> Iterator[Site]:
        yield "here"


# -- plans ---------------------------------------------------------------------------------------------------------


def test_a_plan_for_another_model() -> None:
    plan = fxopt.plan(optimized(Ensemble()))
    with pytest.raises(fxopt.PlanError, match=r"is not in this model") as caught:
        fxopt.optimize(Ensemble(3), FUSE, plan=plan)
    assert caught.value.exit_code == 3
    with pytest.raises(fxopt.PlanError, match="give example_inputs=, too"):
        fxopt.optimize(nn.Sequential(nn.Linear(5, 5)), FUSE, plan=plan)


class OfAnySize(Ensemble):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(*x.shape))


def test_a_plan_for_a_module_that_only_example_inputs_could_capture() -> None:
    plan = fxopt.plan(fxopt.optimize(OfAnySize(), FUSE, example_inputs=(X,), measure=False))
    with pytest.raises(fxopt.PlanError, match=r"no graph of its module: .*; give example_inputs=, too"):
        fxopt.optimize(OfAnySize(), plan=plan)
    assert fxopt.plan(fxopt.optimize(OfAnySize(), plan=plan, example_inputs=(X,))).decisions


@dataclass(frozen=True)
class NeedsInputs(Pass):
    def find(self, program: Program) -> Iterator[Site]:
        linear = next(node for node in program.graphs[""].nodes if node.op == "call_module")
        yield Site(program, "", {"linear": linear.name})

    def rewrite(self, site: Site, edit: Edit) -> None:
        if not site.program.inputs:
            raise MatchFailure("a layer is not there any more")
        linear = edit.graph_node("linear")
        edit.replace(linear, edit.call(torch.relu, linear.args[0]))


def test_a_plan_whose_site_only_example_inputs_show() -> None:
    model = nn.Sequential(nn.Linear(5, 5))
    plan = fxopt.plan(optimized(model, [NeedsInputs()], verify=False))
    with pytest.raises(fxopt.PlanError, match="cannot be rewritten: a layer is not there any more; give example_inp"):
        fxopt.optimize(model, [NeedsInputs()], plan=plan)


def test_a_plan_for_other_passes() -> None:
    plan = fxopt.plan(optimized(Ensemble()))
    for passes in ("eliminate_dead_code", [], "eliminate_dead_code," + FUSE):
        with pytest.raises(fxopt.PlanError, match="the plan is for other passes: 'fuse_ensembles' is number 1 in it"):
            fxopt.optimize(Ensemble(), passes, plan=plan)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(schema_version=99),
        lambda content: content.update(decisions="all"),
        lambda content: content.pop("pipeline"),
        lambda content: content["decisions"][0].update(status="perhaps"),
    ],
)
def test_plans_that_cannot_be_read(tmp_path: Path, change: Callable[[dict], None]) -> None:
    path = tmp_path / "plan.json"
    fxopt.plan(optimized(Ensemble())).save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(fxopt.PlanError):
        fxopt.optimize(Ensemble(), FUSE, plan=path)


@pytest.mark.parametrize("text", ["fuse_ensemble", "fuse_ensembles{loweing=bmm}", "fuse_ensembles{lowering=bmn}"])
def test_plans_of_unknown_passes_are_refused_in_one_line(text: str) -> None:
    plan = fxopt.Plan(pipeline=(text,), phase="eval", decisions=())
    with pytest.raises(fxopt.PlanError, match=f"the plan names '{re.escape(text)}': .*did you mean") as caught:
        fxopt.optimize(Ensemble().eval(), plan=plan)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00"])
def test_plans_that_are_no_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(fxopt.PlanError, match=r"plan.json"):
        fxopt.optimize(Ensemble(), FUSE, plan=path)
    with pytest.raises(fxopt.PlanError, match=r"nowhere.json"):
        fxopt.optimize(Ensemble(), FUSE, plan=tmp_path / "nowhere.json")


def test_a_plan_of_a_newer_version_says_which() -> None:
    plan = fxopt.plan(optimized(Ensemble()))
    newer = json.loads(json.dumps(plan.to_json())) | {"schema_version": 99}
    with pytest.raises(fxopt.PlanError, match="99"):
        type(plan).from_json(newer)
    assert type(plan).from_json(replace(plan, fxopt="99.0").to_json()).fxopt == "99.0"


# -- arguments of another type -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"plan": 3}, "plan is of type int"),
        ({"plan": b"plan.json"}, "plan is of type bytes"),
        ({"seed": "a"}, "seed is of type str"),
        ({"seed": 1.5}, "seed is of type float"),
        ({"inplace": "no"}, "inplace is of type str; give True or False"),
        ({"verify": "yes"}, "verify is of type str; give True or False"),
        ({"measure": []}, "measure is of type list; give True, False or 'cold'"),
        ({"measure": 1}, "measure is of type int; give True, False or 'cold'"),
        ({"measure": "warm"}, "measure='warm'; give True, False or 'cold'"),
        ({"phase": ["eval"]}, "phase of type list; use 'train', 'eval'"),
    ],
)
def test_arguments_of_another_type(arguments: dict[str, object], message: str) -> None:
    model = Ensemble()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(fxopt.UsageError) as raised:
        fxopt.optimize(model, FUSE, example_inputs=(X,), **arguments)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
    assert type(model) is Ensemble
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_other_functions_name_what_they_expect(tmp_path: Path) -> None:
    fast = fxopt.optimize(Ensemble(), FUSE, example_inputs=(X,), measure=False)
    attempts: list[Callable[[], object]] = [
        lambda: fxopt.capture(3),
        lambda: fxopt.save(fast, 3),
        lambda: fxopt.load(3),
        lambda: fxopt.load(tmp_path / "none", trust=3),
        lambda: fxopt.export(fast, 3, (X,)),
        lambda: fxopt.export(fast, tmp_path / "model.pt2", (X,), dynamic_batch="no"),
    ]
    for attempt in attempts:
        with pytest.raises(fxopt.UsageError, match=r"of type (int|str); give|expected a torch.nn.Module, got int"):
            attempt()
