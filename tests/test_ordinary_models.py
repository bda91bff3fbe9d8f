"""Models as people write them, optimized with default settings: nothing raises, and the results are the same."""

from __future__ import annotations

import copy
import enum
import importlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxopt

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(3, 4, generator=GENERATOR)
IMAGES = torch.randn(2, 3, 8, 8, generator=GENERATOR)


def close(given: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)


# -- an empty Sequential is the identity ---------------------------------------------------------------------------


class Block(nn.Module):
    """The block of a CIFAR ResNet."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(Block(3, 4), Block(4, 4)), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


class Blocks(nn.Module):
    """An ensemble of such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(Block(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members])


@pytest.mark.parametrize("preset", ["inference", "training"])
def test_resnet_with_an_empty_shortcut(preset: str) -> None:
    model = ResNet().train(preset == "training")
    fast = fxopt.optimize(model, preset, example_inputs=(IMAGES,), measure=False)
    close(fast(IMAGES), copy.deepcopy(model)(IMAGES))


def test_verifying_inside_fused_members_leaves_their_statistics_alone() -> None:
    model = Blocks().eval()
    fast = fxopt.optimize(model, example_inputs=(IMAGES,), measure=False)
    assert {d.pass_name for d in fxopt.plan(fast).decisions if d.status == "applied"} == {
        "fold_batchnorm",
        "fuse_ensembles",
    }
    close(fast(IMAGES), model(IMAGES))
    state = fxopt.state_dict(fast)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("again", ["fold_batchnorm", "inference", "fuse_ensembles"])
def test_optimizing_a_folded_model_again(again: str) -> None:
    model = ResNet().eval()
    folded = fxopt.optimize(model, "fold_batchnorm", example_inputs=(IMAGES,), measure=False)
    twice = fxopt.optimize(folded, again, example_inputs=(IMAGES,), measure=False)
    close(twice(IMAGES), model(IMAGES))
    close(fxopt.restore(twice)(IMAGES), model(IMAGES))
    assert list(fxopt.state_dict(twice)) == list(model.state_dict())


# -- modules that are no plain ones --------------------------------------------------------------------------------


class Around(nn.Module):
    """Holds a module of another kind."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.out = inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))


class Heads(nn.Module):
    def __init__(self, member: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh())) -> None:
        super().__init__()
        self.heads = nn.ModuleList(member() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads])


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


@pytest.mark.parametrize(
    "model",
    [
        lambda: fx.symbolic_trace(plain()),
        lambda: torch.export.export(plain(), (X,)).module(),
        lambda: Around(fx.symbolic_trace(plain())),
        lambda: fx.symbolic_trace(Heads()),
        lambda: torch.export.export(Heads(), (X,)).module(),
    ],
)
def test_graph_modules(model: Callable[[], nn.Module]) -> None:
    before = model()
    fast = fxopt.optimize(before, "fold_constants,fuse_ensembles{lowering=bmm}", example_inputs=(X,), measure=False)
    expected = before(X)
    for same in (fast, copy.deepcopy(fast), fxopt.restore(fast)):
        close(same(X), expected)
    assert set(fxopt.state_dict(fast)) == set(before.state_dict())


def test_a_loaded_pt2_file(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(plain(), (X,)), tmp_path / "model.pt2")
    model = torch.export.load(tmp_path / "model.pt2").module()
    close(fxopt.optimize(model, example_inputs=(X,), measure=False)(X), model(X))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_children_that_torchscript_compiled() -> None:
    model = Around(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))).eval()
    for examples in ((X,), None):
        fast = fxopt.optimize(model, example_inputs=examples)
        close(fast(X), model(X))
        assert list(fxopt.state_dict(fast)) == list(model.state_dict())
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
    fast(X).square().sum().backward()
    optimizer.step()
    assert not torch.equal(fast.inner.state_dict()["0.weight"], model.inner.state_dict()["0.weight"])
    close(fxopt.restore(fast)(X), fast(X))
    assert "" in fxopt.capture(model, (X,)).graphs


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_that_torchscript_compiled_is_refused() -> None:
    for model in (torch.jit.script(plain()), torch.jit.trace(plain(), X)):
        for attempt in (fxopt.optimize, fxopt.capture):
            with pytest.raises(fxopt.InputError, match="TorchScript compiled it") as raised:
                attempt(model)
            assert "\n" not in str(raised.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_reasons_of_opaque_modules_are_one_line() -> None:
    twice = torch.jit.trace(lambda x: x * 2, X)

    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return twice(x)

    opaque = fxopt.capture(Calls(), (X,)).opaque
    assert all("\n" not in found.reason for found in opaque.values())


# -- quantized by torchao ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_quantized_first() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    x = torch.randn(2, 32)
    for model in (Heads(lambda: nn.Linear(32, 32)), nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))):
        quantization.quantize_(model.eval(), quantization.Int8DynamicActivationInt8WeightConfig())
        with torch.no_grad():
            for preset in ("inference", "fuse_ensembles{lowering=bmm}"):
                close(fxopt.optimize(model, preset, example_inputs=(x,))(x), model(x))


@pytest.mark.filterwarnings("ignore")
def test_quantized_afterwards() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    config, x = quantization.Int8DynamicActivationInt8WeightConfig(), torch.randn(2, 32)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).eval()
    fast = fxopt.optimize(model, example_inputs=(x,), measure=False)
    quantization.quantize_(fast, config)
    quantization.quantize_(model, config)
    with torch.no_grad():
        close(fast(x), model(x))
    fused = fxopt.optimize(Heads(lambda: nn.Linear(32, 32)), "fuse_ensembles{lowering=bmm}", example_inputs=(x,))
    with pytest.raises(fxopt.FusedMemberError, match="quantize the model first"):
        quantization.quantize_(fused, config)


# -- archives ------------------------------------------------------------------------------------------------------


class LastStates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.LSTM(4, 5, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x)[0] for member in self.members])


@pytest.mark.parametrize(
    ("build", "x"),
    [
        (lambda: Heads(lambda: nn.Conv2d(3, 4, 3)), IMAGES),
        (LastStates, X.unsqueeze(0)),
        (lambda: Heads(lambda: nn.Linear(128, 160)), torch.randn(2, 128)),
        (Blocks, IMAGES),
    ],
)
def test_what_was_saved_loads(build: Callable[[], nn.Module], x: Tensor, tmp_path: Path) -> None:
    model = build().eval()
    fast = fxopt.optimize(model, "fold_batchnorm,fuse_ensembles", example_inputs=(x,), measure=False)
    applied = [d.key for d in fxopt.plan(fast).decisions if d.status == "applied"]
    assert applied
    fxopt.save(fast, tmp_path / "model.fxopt")
    loaded = fxopt.load(tmp_path / "model.fxopt", model=build().eval())
    assert [d.key for d in fxopt.plan(loaded).decisions if d.status == "applied"] == applied
    close(loaded(x), model(x))


BERT = """
import torch
from transformers import BertConfig, BertModel

def build():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 20, "max_position_embeddings": 8}
    return BertModel(BertConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)).eval()

def example_inputs():
    ids = torch.arange(12).reshape(2, 6)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
"""


def test_what_is_captured_on_inputs_only_loads_with_them_or_such_as_they_are(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "zoo_of_one.py").write_text(BERT)
    monkeypatch.syspath_prepend(tmp_path)
    zoo = importlib.import_module("zoo_of_one")
    model, inputs = zoo.build(), zoo.example_inputs()
    fast = fxopt.optimize(model, "fuse_ensembles{lowering=wide}", example_inputs=inputs, measure=False)
    fxopt.save(fast, tmp_path / "bert.fxopt", factory="zoo_of_one:build")
    given = {"model": zoo.build(), "example_inputs": inputs}
    for options in ({"trust": "zoo_of_one"}, given, {"model": zoo.build()}):
        loaded = fxopt.load(tmp_path / "bert.fxopt", **options)
        assert len(list(loaded.parameters())) == len(list(fast.parameters())) < len(list(model.parameters()))
        close(loaded(**inputs).last_hidden_state, model(**inputs).last_hidden_state)


# -- without example inputs ----------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x + 1


class Unpacks(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), inner

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.inner(self.first(x))
        return y * 2


@pytest.mark.parametrize("inner", [Pair, lambda: nn.LSTM(4, 4)])
def test_results_unpacked_without_example_inputs(inner: Callable[[], nn.Module]) -> None:
    model = Unpacks(inner())
    program = fxopt.capture(model)
    assert "" in program.graphs
    for graph in program.graphs.values():
        graph.lint()
    close(program.model(X), model(X))
    close(fxopt.optimize(model, "training")(X), model(X))


# -- configurations ------------------------------------------------------------------------------------------------


class Mode(enum.Enum):
    ADD = 1
    SUBTRACT = 2


class Activation(enum.StrEnum):
    RELU = "relu"
    TANH = "tanh"


class Part(enum.IntFlag):
    SHIFT = 1
    SCALE = 2


class Settings:
    def __init__(self) -> None:
        self.mode, self.activation, self.parts = Mode.ADD, Activation.RELU, Part.SHIFT | Part.SCALE
        self.gains = {Activation.RELU: 1.0, Activation.TANH: 2.0}


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config, self.linear = Settings(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        y = self.linear(x)
        y = y + 1 if config.mode is Mode.ADD else y - 1
        y = y + 3 if config.parts & Part.SHIFT else y
        return getattr(torch, config.activation.value)(y) * config.gains[config.activation]


def test_enumerations_in_a_configuration() -> None:
    model = Configured()
    program = fxopt.capture(model, (X,))
    assert "" in program.graphs
    changes: list[Callable[[Settings], None]] = [
        lambda config: None,
        lambda config: setattr(config, "mode", Mode.SUBTRACT),
        lambda config: setattr(config, "parts", Part.SCALE),
        lambda config: config.gains.update({Activation.RELU: 3.0}),
        lambda config: setattr(config, "activation", Activation.TANH),
    ]
    for change in changes:
        for each in (model, program.model):
            change(each.config)
        close(program.model(X), model(X))


class Numbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = {"gains": [1, 2], "zero": 0.0}

    def forward(self, x: Tensor, more: dict[str, float], zero: float) -> tuple[Tensor, ...]:
        first, second = self.config["gains"]
        return x * first, x * second, *(torch.full((2,), v) for v in (self.config["zero"], zero, more["gain"]))


@pytest.mark.parametrize(
    ("change", "arguments"),
    [
        (lambda config: config["gains"].__setitem__(0, 1.0), ({"gain": 1}, 0.0)),
        (lambda config: config["gains"].__setitem__(0, True), ({"gain": 1}, 0.0)),
        (lambda config: config.update(zero=-0.0), ({"gain": 1}, 0.0)),
        (lambda config: None, ({"gain": 1.0}, 0.0)),
        (lambda config: None, ({"gain": 1}, -0.0)),
    ],
)
def test_numbers_that_are_equal_but_not_the_same(change: Callable[..., None], arguments: tuple[object, ...]) -> None:
    x = torch.arange(3)
    model = Numbers()
    program = fxopt.capture(model, (x, {"gain": 1}, 0.0))
    assert "" in program.graphs
    for each in (model, program.model):
        change(each.config)
    for given, expected in zip(program.model(x, *arguments), model(x, *arguments), strict=True):
        assert given.dtype == expected.dtype
        assert torch.equal(given, expected)
        assert torch.equal(torch.signbit(given), torch.signbit(expected))


# -- the process ---------------------------------------------------------------------------------------------------


def test_the_process_is_left_as_it_was() -> None:
    code = """
    import random, threading
    import torch, fxopt
    from torch import nn

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            return torch.stack([head(x) for head in self.heads])

    model, x = Heads().eval(), torch.randn(3, 4)
    state, threads = random.getstate(), set(threading.enumerate())
    fast = fxopt.optimize(model, "fuse_ensembles{lowering=vmap}", example_inputs=(x,), measure=False)
    fast(x)
    str(fxopt.report(fast))
    assert random.getstate() == state, "the random stream was moved"
    assert set(threading.enumerate()) == threads, threading.enumerate()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_model_with_a_compiled_child_is_timed_and_compared() -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = torch.jit.script(nn.Linear(4, 4))
            self.rest = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(torch.relu(self.child(x)))

    model = Doubling().eval()
    fast = fxopt.optimize(model, "fold_batchnorm", example_inputs=(X,))
    assert fxopt.plan(fast).decisions
    torch.testing.assert_close(fast(X), model(X))
    assert type(vars(fast.child)["_modules"]) is type(vars(model.child)["_modules"])
