from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.deploy import archive
from fxopt.errors import ArchiveError, PlanError, UsageError
from fxopt.runtime.record import Decision, Plan, Record
from fxopt.runtime.state import StateMap
from fxopt.tracing.isolation import skeleton_of

SOURCE = """
import torch
from torch import nn

IMPORTED = []

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        IMPORTED.append(self)
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.b(self.a(x)))

class Sized(Tied):
    def __init__(self, size):
        super().__init__()
"""

PLAN = Plan(("fuse_ensembles",), "train", (Decision(0, "fuse_ensembles", "(root):a..b(2)", "applied"),))


pytestmark = pytest.mark.usefixtures("zoo")


def record(model: nn.Module) -> Record:
    return Record(PLAN, StateMap(), {}, {}, "", 0, 0, skeleton=skeleton_of(model))


def save(model: nn.Module, path: Path, **options: Any) -> Path:
    options = {"record": record(model), "state": model.state_dict(), **options}
    archive.save(model, path, **options)
    return path


class Replay:
    """Stand in for `fxopt.optimize(plan=...)`, and remember what was asked."""

    def __call__(self, original: nn.Module, plan: Plan, phase: str, inputs: object) -> nn.Module:
        self.asked = (plan, phase)
        return original


def load(path: Path, **options: Any) -> nn.Module:
    return archive.load(path, **{"replay": Replay(), **options})


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ArchiveError) as caught:
        load(path, **options)
    return str(caught.value)


def test_gives_class_weights_buffers_and_plan_back(zoo: Any, tmp_path: Path):
    model = zoo.Tied().train()
    model(torch.randn(8, 3))
    replay = Replay()
    loaded = load(save(model, tmp_path / "m"), replay=replay, trust=["zoo"])
    assert type(loaded) is zoo.Tied
    assert loaded.b.weight is loaded.a.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert replay.asked == (PLAN, "train")


def test_tied_tensors_are_stored_once_and_views_whole(zoo: Any, tmp_path: Path):
    from safetensors.torch import load as read

    model = zoo.Tied()
    stack = torch.arange(18.0).reshape(2, 3, 3)
    state = {**model.state_dict(), "a.weight": stack[0], "b.weight": stack[0], "a.bias": stack[1, :, 0]}
    save(model, tmp_path / "m", state=state)
    with zipfile.ZipFile(tmp_path / "m") as opened:
        stored = read(opened.read("weights.safetensors"))
    assert "b.weight" not in stored
    assert torch.equal(stored["a.bias"], stack[1, :, 0])
    loaded = load(tmp_path / "m", model=model)
    assert torch.equal(cast(Tensor, loaded.state_dict()["b.weight"]), stack[0])


def test_a_model_given_is_copied_and_nothing_is_imported(zoo: Any, tmp_path: Path):
    model, other = zoo.Tied(), zoo.Tied()
    before = copy.deepcopy(other.state_dict())
    path = save(model, tmp_path / "m")
    built = len(zoo.IMPORTED)
    loaded = load(path, model=other)
    assert torch.equal(loaded.a.weight, model.a.weight)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())
    assert len(zoo.IMPORTED) == built


def test_modes_frozen_parameters_and_dtypes_come_back(zoo: Any, tmp_path: Path):
    model = zoo.Tied().half().train()
    model.norm.eval()
    model.a.bias.requires_grad_(False)
    loaded = load(save(model, tmp_path / "m"), trust=["zoo"])
    assert loaded.training
    assert not loaded.norm.training
    assert loaded.b.training
    assert [name for name, p in loaded.named_parameters() if not p.requires_grad] == ["a.bias"]
    assert {p.dtype for p in loaded.parameters()} == {torch.float16}
    assert loaded.norm.num_batches_tracked.dtype == torch.int64


def test_code_is_imported_only_from_trusted_packages(zoo: Any, tmp_path: Path):
    path = save(zoo.Tied(), tmp_path / "m")
    built = len(zoo.IMPORTED)
    for trust in ((), ["zo"], ["zoo.models"], ["other"]):
        assert "would import and call 'zoo:Tied'; pass trust=['zoo']" in refusal(path, trust=trust)
    assert len(zoo.IMPORTED) == built


OTHERS = [("zoo:nn.Identity", "torch"), ("zoo:torch.seed", "torch"), ("zoo:sys.exit", "sys")]


@pytest.mark.parametrize(("factory", "owner"), OTHERS)
def test_trust_in_a_package_covers_no_others_that_it_imports(factory: str, owner: str, zoo: Any, tmp_path: Path):
    zoo.sys = sys
    path = save(zoo.Tied(), tmp_path / "m", factory=factory)
    wanted = f"add {owner!r} to trust= (--trust {owner}, too, on the command line), or pass model="
    assert wanted in refusal(path, trust=["zoo"])


def test_weights_of_other_types_come_back_with_them(zoo: Any, tmp_path: Path):
    model = zoo.Tied()
    state = {name: (tensor * 10).to(torch.int8) for name, tensor in model.state_dict().items()}
    loaded = load(save(model, tmp_path / "m", state=state), trust=["zoo"])
    assert {p.dtype for p in loaded.parameters()} == {torch.int8}
    assert not any(p.requires_grad for p in loaded.parameters())


def test_a_class_that_needs_arguments_wants_a_factory_or_a_model(zoo: Any, tmp_path: Path):
    model = zoo.Sized(3)
    assert "does not say how to build its model; pass model=" in refusal(save(model, tmp_path / "m"), trust=["zoo"])
    assert type(load(tmp_path / "m", model=zoo.Sized(3))) is zoo.Sized
    assert type(load(save(model, tmp_path / "f", factory="zoo:Tied"), trust=["zoo"])) is zoo.Tied


def test_a_factory_that_is_not_there_is_refused_when_saving(zoo: Any, tmp_path: Path):
    with pytest.raises(UsageError, match=r"zoo has no 'build'"):
        save(zoo.Tied(), tmp_path / "m", factory="zoo:build")
    assert not (tmp_path / "m").exists()


def test_a_pass_that_would_not_be_found_again_is_refused_when_saving(zoo: Any, tmp_path: Path):
    made = dataclasses.replace(record(zoo.Tied()), plan=dataclasses.replace(PLAN, pipeline=("of_a_notebook{size=3}",)))
    with pytest.raises(UsageError, match=r"'of_a_notebook\{size=3\}' would not be found: unknown pass .*; register it"):
        save(zoo.Tied(), tmp_path / "m", record=made)
    assert not (tmp_path / "m").exists()


def test_what_cannot_be_stored_is_named(zoo: Any, tmp_path: Path):
    model = zoo.Tied()
    for value, problem in (
        (torch.empty(3, device="meta"), "'a.bias' is on the meta device"),
        (torch.eye(3).to_sparse(), "'a.bias' is sparse"),
        ({"extra": 1}, "'a.bias' is a dict, not a tensor"),
    ):
        with pytest.raises(ArchiveError, match=problem):
            save(model, tmp_path / "m", state={**model.state_dict(), "a.bias": value})
    assert not (tmp_path / "m").exists()


def test_weights_of_another_model(zoo: Any, tmp_path: Path):
    text = refusal(save(zoo.Tied(), tmp_path / "m"), model=nn.Linear(3, 3))
    assert "do not fit the model" in text
    assert "a.weight" in text


def test_a_model_on_the_meta_device_gets_no_values(zoo: Any, tmp_path: Path):
    path = save(zoo.Tied(), tmp_path / "m")
    with pytest.warns(UserWarning, match="meta"):
        assert "is on the meta device" in refusal(path, model=zoo.Tied().to("meta"))


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        (
            "kind",
            "standalone",
            "is a standalone archive, which this fxopt does not read; write the model again with",
        ),
        ("kind", "other", "is of kind 'other'; this fxopt loads 'recipe'"),
        ("kind", None, "is of kind None"),
        ("training", 1, "'training' is missing or wrong"),
        ("frozen", None, "'frozen' is missing or wrong"),
        ("aliases", {"b.weight": "nowhere"}, "'b.weight' cannot be tied to 'nowhere'"),
        ("aliases", {"a.bias": "a.weight"}, "'a.bias' cannot be tied to 'a.weight'"),
        ("aliases", [], "'aliases' is missing or wrong"),
        ("aliases", {"b.weight": []}, "'b.weight' cannot be tied to []"),
        ("factory", 3, "'factory' is missing or wrong"),
        ("factory", "os:system('x')", "is damaged: \"os:system('x')\" does not name a model"),
    ],
)
def test_a_manifest_that_lies(
    zoo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, problem: str
):
    written = archive.write_container
    monkeypatch.setattr(archive, "write_container", lambda p, manifest, m: written(p, {**manifest, key: value}, m))
    assert problem in refusal(save(zoo.Tied(), tmp_path / "m"), trust=["zoo", "os"])


def test_weights_that_are_a_pickle_run_nothing(zoo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    monkeypatch.setattr(archive, "weights_bytes", lambda stored: pickle.dumps(Bomb()))
    assert "its weights are unreadable" in refusal(save(zoo.Tied(), tmp_path / "m"), trust=["zoo"])
    assert not (tmp_path / "ran").exists()


def without_plan(original: nn.Module, plan: Plan, phase: str, inputs: object) -> nn.Module:
    raise PlanError("the plan's site is not in this model")


def test_says_which_modules_had_hooks_if_the_plan_does_not_fit_without(zoo: Any, tmp_path: Path):
    model = zoo.Tied()
    model.norm.register_forward_hook(lambda *_: None)
    path = save(model, tmp_path / "m.fxopt")
    said = refusal(path, replay=without_plan, model=zoo.Tied())
    assert "the plan's site is not in this model. 'norm' had hooks when the model was optimized" in said
    assert "pass that as model=" in said
    assert type(load(path, model=zoo.Tied())) is zoo.Tied
    with pytest.raises(PlanError):
        load(path, replay=without_plan, model=model)


def test_hooks_that_transformers_installs_are_there_again(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=16)
    model, ids = transformers.BertModel(config).eval(), torch.arange(8).reshape(2, 4)
    model(ids, output_hidden_states=True)
    fast = fxopt.optimize(model, "inference", example_inputs=(ids,), measure=False)
    fxopt.save(fast, tmp_path / "bert.fxopt")
    again = fxopt.load(tmp_path / "bert.fxopt", model=transformers.BertModel(config).eval())
    torch.testing.assert_close(again(ids)[0], model(ids)[0])
    assert len(again(ids, output_hidden_states=True).hidden_states) == 2
