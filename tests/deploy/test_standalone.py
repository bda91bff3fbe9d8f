from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.deploy.flat_model import FlatModel
from fxopt.errors import GuardError, ModeError, UsageError
from fxopt.testing import assert_equivalent


class MultiHead(nn.Module):
    def __init__(self, heads: int = 5):
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(heads))

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=1)


class Block(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + x)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.blocks = nn.ModuleList(Block(4) for _ in range(2))
        self.classifier = nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("shift", torch.tensor(0.5), persistent=False)
        self.offset = torch.arange(3.0)

    def forward(self, images, mask=None):
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        pooled = F.dropout(F.adaptive_avg_pool2d(x, 1).flatten(1), 0.5, self.training)
        return {"logits": self.classifier(pooled) * self.scale + self.shift + self.offset, "parts": (pooled, [x])}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.twice = nn.Linear(6, 6)
        self.again = self.twice
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.again(torch.tanh(self.twice(self.embed(ids)))))


class Deciding(nn.Module):
    """Its two modes differ in what they compute, not only in a flag that a function takes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        if self.training:
            return self.linear(x) + torch.rand_like(x)
        return self.linear(x)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.calls


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.recurrent = nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        attended, weights = self.attention(x, x, x, need_weights=True)
        out, (hidden, _) = self.recurrent(attended)
        b, t, _ = out.shape
        return self.norm(out).view(b * t, -1), weights, hidden[-1]


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = NestedInner()

    def forward(self, inputs, *, extra, factor=2.0):
        first, (second, third) = inputs
        found = self.inner({"a": first, "b": [second, None]}, flag=True)
        return found["sum"] * factor + extra["bias"], third, found["none"]


class NestedInner(nn.Module):
    def forward(self, values, flag=False):
        total = values["a"] + values["b"][0]
        return {"sum": total if flag else -total, "none": values["b"][1]}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "multi-head": (MultiHead, lambda: (torch.randn(3, 4),)),
    "sequential": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(144, 2),
        ),
        lambda: (torch.randn(2, 3, 8, 8),),
    ),
    "residual": (Residual, lambda: (torch.randn(2, 3, 8, 8),)),
    "tied": (Tied, lambda: (torch.randint(0, 11, (2, 5)),)),
    "deciding": (lambda: Outer(Outer(Deciding())), lambda: (torch.randn(2, 3),)),
    "counting": (Counting, lambda: (torch.randn(2, 3),)),
    "attending": (Attending, lambda: (torch.randn(2, 5, 8),)),
    "nested": (
        Nested,
        lambda: fxopt.Inputs((torch.ones(2), (torch.randn(2), torch.randn(3))), extra={"bias": torch.randn(2)}),
    ),
}

each_model = pytest.mark.parametrize("name", MODELS)


def optimized(name: str, passes: Any = ()) -> tuple[nn.Module, fxopt.Inputs]:
    make, inputs = MODELS[name]
    given = inputs()
    call = given if isinstance(given, fxopt.Inputs) else fxopt.Inputs(*given)
    return fxopt.optimize(make().eval(), passes, example_inputs=given, measure=False), call


def reloaded(model: nn.Module, path: Path) -> Any:
    fxopt.save(model, path, kind="standalone")
    return fxopt.load(path)


def run(model: nn.Module, call: fxopt.Inputs) -> Any:
    torch.manual_seed(3)
    return model(*copy.deepcopy(call.args), **copy.deepcopy(call.kwargs))


def same(first: Any, second: Any) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@each_model
def test_loaded_models_give_the_same_bits_in_both_modes(name: str, tmp_path: Path):
    model, call = optimized(name)
    flat = reloaded(model, tmp_path / "m")
    assert type(flat).__name__ == "FlatModel"
    assert not flat.training
    for training in (False, True, False):
        same(run(flat.train(training), call), run(model.train(training), call))
    for (key, mine), (other, theirs) in zip(flat.state_dict().items(), model.state_dict().items(), strict=True):
        assert key == other
        same(mine, theirs)


@each_model
def test_gradients_are_the_same(name: str, tmp_path: Path):
    model, call = optimized(name)
    flat = reloaded(model, tmp_path / "m")
    assert_equivalent(model, flat, call)
    assert_equivalent(model, flat, call, training=True)


def test_names_structure_and_flags_come_back(tmp_path: Path):
    model, _ = optimized("residual")
    model.stem.weight.requires_grad_(False)
    model.blocks[1].norm1.train()
    flat = reloaded(model, tmp_path / "m")
    assert [name for name, p in flat.named_parameters() if not p.requires_grad] == ["stem.weight"]
    assert "shift" not in flat.state_dict()
    assert "offset" not in flat.state_dict()
    assert set(dict(flat.named_buffers())) == {*dict(model.named_buffers()), "offset"}
    assert [name for name, module in flat.named_modules() if module.training] == ["blocks.1.norm1"]
    assert isinstance(flat.blocks.get_submodule("0.conv1"), nn.Conv2d)


def test_tied_tensors_are_stored_once_and_stay_tied(tmp_path: Path):
    model, call = optimized("tied")
    flat = reloaded(model, tmp_path / "m")
    assert flat.head.weight is flat.embed.weight
    assert flat.again is flat.twice
    assert len(list(flat.parameters())) == len(list(model.parameters())) == 3
    assert (tmp_path / "m").stat().st_size < 4 * 2 * sum(p.numel() for p in model.parameters()) + 10_000
    flat(*call.args).sum().backward()
    model(*call.args).sum().backward()
    same(flat.embed.weight.grad, model.embed.weight.grad)


def test_copies_pickles_and_moves(tmp_path: Path):
    model, call = optimized("residual")
    flat = reloaded(model, tmp_path / "m")
    expected = run(flat, call)
    for twin in (copy.deepcopy(flat), pickle.loads(pickle.dumps(flat)), reloaded(flat, tmp_path / "again")):
        assert type(twin) is type(flat)
        assert twin.stem.weight is not flat.stem.weight
        same(run(twin, call), expected)
    double = copy.deepcopy(flat).double()
    wide = fxopt.Inputs(call.args[0].double())
    assert run(double, wide)["logits"].dtype == torch.float64
    torch.testing.assert_close(run(double, wide)["logits"].float(), expected["logits"])
    assert all(tensor.is_meta for tensor in copy.deepcopy(flat).to("meta").state_dict().values())
    with torch.no_grad():
        flat.stem.weight.zero_()
    assert not torch.equal(run(flat, call)["logits"], expected["logits"])


@pytest.mark.gpu
def test_runs_where_it_is_moved(tmp_path: Path):
    model, call = optimized("residual")
    flat = reloaded(model, tmp_path / "m").cuda()
    torch.testing.assert_close(
        flat(call.args[0].cuda())["logits"].cpu(), model(*call.args)["logits"], rtol=1e-2, atol=1e-3
    )


def test_a_training_step_changes_both_alike(tmp_path: Path):
    model, call = optimized("sequential")
    flat = reloaded(model, tmp_path / "m")
    for net in (model, flat):
        optimizer = torch.optim.SGD(net.train().parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            run(net, call).square().mean().backward()
            optimizer.step()
    for mine, theirs in zip(flat.state_dict().values(), model.state_dict().values(), strict=True):
        same(mine, theirs)


@pytest.mark.parametrize("lowering", ["wide", "wide_input_first", "bmm", "grouped_conv", "vmap"])
def test_fused_ensembles_load_old_checkpoints_too(lowering: str, tmp_path: Path):
    model, call = optimized("multi-head", f"fuse_ensembles{{lowering={lowering}}}")
    flat = reloaded(model, tmp_path / "m")
    same(run(flat, call), run(model, call))
    original = MultiHead().eval()
    assert list(fxopt.state_dict(flat)) == list(original.state_dict())
    fxopt.load_state_dict(flat, original.state_dict())
    torch.testing.assert_close(run(flat, call), run(original, call))
    assert_equivalent(original, flat, call)


def test_other_batch_sizes_and_shapes_work(tmp_path: Path):
    model, _ = optimized("residual")
    flat = reloaded(model, tmp_path / "m")
    for shape in ((1, 3, 8, 8), (5, 3, 12, 9)):
        images = torch.randn(shape)
        same(flat(images), model(images))


def test_the_forward_has_the_arguments_that_it_had(tmp_path: Path):
    model, call = optimized("nested")
    flat = reloaded(model, tmp_path / "m")
    inputs, extra = call.args[0], call.kwargs["extra"]
    same(flat(inputs=inputs, extra=extra), model(inputs, extra=extra))
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'extra'"):
        flat(inputs)
    for wrong in ({"extra": extra, "factor": 3.0}, {"extra": {}}, {"extra": [extra["bias"]]}):
        with pytest.raises(GuardError, match="none that the model was saved for"):
            flat(inputs, **wrong)
    with pytest.raises(GuardError, match=r"inputs is a tuple of 2"):
        flat(list(inputs), extra=extra)


def test_several_kinds_of_calls_each_have_a_graph(tmp_path: Path):
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x, mask=None):
            return self.linear(x) if mask is None else self.linear(x) * mask

    x, mask = torch.randn(2, 3), torch.rand(2, 3)
    model = fxopt.optimize(Optional().eval(), [], example_inputs=[(x,), (x, mask)])
    flat = reloaded(model, tmp_path / "m")
    assert list(fxopt.graphs(flat)) == ["", "#1"]
    same(flat(x), model(x))
    same(flat(x, mask=mask), model(x, mask))


def test_what_decided_is_checked_when_the_model_is_called(tmp_path: Path):
    class Halving(nn.Module):
        def forward(self, x):
            return x[:, : x.shape[1] // 2] if x.shape[1] > 4 else x

    model = fxopt.optimize(nn.Sequential(nn.Linear(3, 6), Halving()), [], example_inputs=(torch.randn(2, 3),))
    flat = reloaded(model, tmp_path / "m")
    same(flat(torch.ones(5, 3)), model(torch.ones(5, 3)))
    flat.get_submodule("0").weight = nn.Parameter(torch.randn(4, 3))
    flat.get_submodule("0").bias = nn.Parameter(torch.randn(4))
    with pytest.raises(GuardError, match=r"shape\[1\] > 4"):
        flat(torch.ones(5, 3))


@pytest.mark.parametrize("depth", [0, 1])
def test_what_a_parameter_decided_is_checked_when_the_model_is_called(depth: int, tmp_path: Path):
    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            if self.linear.weight.dtype == torch.float64:
                return self.linear(x) * 100
            if x.dtype != self.linear.weight.dtype or self.linear.weight.shape[1] != x.shape[-1]:
                return self.linear(x.to(self.linear.weight.dtype)[..., :3])
            return self.linear(x)

    model = fxopt.optimize(Outer(Casting()) if depth else Casting(), [], example_inputs=(torch.randn(2, 3),))
    flat = reloaded(model, tmp_path / "m")
    x = torch.randn(4, 3)
    same(flat(x), model(x))
    for wrong in (x.double(), torch.randn(4, 5)):
        with pytest.raises(GuardError):
            flat(wrong)
    with pytest.raises(GuardError, match="dtype"):
        flat.double()(x.double())


def test_gradient_mode_decides_again(tmp_path: Path):
    class Asking(nn.Module):
        def forward(self, x):
            return x * 2 if torch.is_grad_enabled() else x * 3

    model = fxopt.optimize(Outer(Asking()), [], example_inputs=(torch.randn(2, 3),))
    flat = reloaded(model, tmp_path / "m")
    assert flat(torch.ones(1)).item() == 4
    with torch.no_grad():
        assert flat(torch.ones(1)).item() == 6


def test_a_model_rewritten_for_evaluation_refuses_to_train(tmp_path: Path):
    model, call = optimized("sequential", "fold_batchnorm")
    assert fxopt.report(model).to_json()["decisions"][0]["status"] == "applied"
    flat = reloaded(model, tmp_path / "m")
    same(run(flat, call), run(model, call))
    assert not flat.eval().training
    for refused in (flat, nn.ModuleList([flat])):
        with pytest.raises(ModeError, match="was saved for evaluation only"):
            refused.train()
    again = copy.deepcopy(flat)
    with pytest.raises(ModeError):
        again.train()


def test_a_graph_for_one_mode_only_refuses_the_other(tmp_path: Path):
    class Half(nn.Module):
        def forward(self, x):
            if self.training:
                return torch.from_numpy(x.detach().numpy() + 1)
            return x * 2

    model = fxopt.optimize(Outer(Half()).eval(), [], example_inputs=(torch.randn(2, 3),))
    flat = reloaded(model, tmp_path / "m")
    assert flat(torch.ones(1)).item() == 4
    with pytest.raises(ModeError, match="saved for evaluation only"):
        flat.train()
    flat.inner.train()
    with pytest.raises(GuardError, match="training"):
        flat(torch.ones(1))


def test_flat_models_are_optimized_and_saved_again(tmp_path: Path):
    model, call = optimized("multi-head")
    flat = reloaded(model, tmp_path / "m")
    fused = fxopt.optimize(flat, "fuse_ensembles{lowering=bmm}", example_inputs=call, measure=False)
    assert [decision.status for decision in fxopt.plan(fused).decisions] == ["applied"]
    again = reloaded(fused, tmp_path / "again")
    torch.testing.assert_close(run(again, call), run(model, call))
    assert list(fxopt.state_dict(again)) == list(model.state_dict())
    fxopt.load_state_dict(again, model.state_dict())


def test_compiles_and_exports(tmp_path: Path):
    model, call = optimized("sequential")
    flat = reloaded(model, tmp_path / "m")
    same(torch.compile(flat, backend="eager", fullgraph=True)(*call.args), run(model, call))
    same(torch.export.export(flat, call.args).module()(*call.args), run(model, call))


def test_model_outputs_come_back_as_dictionaries(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    from dataclasses import dataclass

    @dataclass
    class Found(transformers.utils.ModelOutput):
        first: Tensor | None = None
        second: Tensor | None = None
        third: tuple[Tensor, ...] | None = None

    class Inner(nn.Module):
        def forward(self, x):
            return Found(first=x + 1, third=(x, x * 2))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            found = self.inner(x)
            assert found.second is None
            return Found(first=found[0] + found["third"][1], second=found.to_tuple()[1][0])

    model = fxopt.optimize(Model(), [], example_inputs=(torch.randn(3),))
    flat = reloaded(model, tmp_path / "m")
    x = torch.randn(3)
    assert type(flat(x)) is dict
    same(flat(x), dict(model(x)))


FRESH = """
import sys
import torch, fxopt
flat, (args, expected) = fxopt.load(sys.argv[1]), torch.load(sys.argv[2])
assert not any(name.startswith(("test_standalone", "transformers")) for name in sys.modules), "imported the user's code"
torch.testing.assert_close(flat(*args), expected, rtol=0, atol=0)
flat.train()
print(type(flat).__name__)
"""


@pytest.mark.parametrize("name", ["residual", "tied", "multi-head"])
def test_loads_where_nobody_knows_the_class(name: str, tmp_path: Path):
    model, call = optimized(name)
    fxopt.save(model, tmp_path / "m", kind="standalone")
    torch.save((call.args, run(model, call)), tmp_path / "case.pt")
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path / "m"), str(tmp_path / "case.pt")],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "FlatModel"), done.stderr


def test_every_plain_value_survives(tmp_path: Path):
    class Constants(nn.Module):
        def forward(self, x):
            filled = (
                x.masked_fill(x > 1e30, -math.inf)
                .clamp(min=-math.inf)
                .to(torch.float64, memory_format=torch.preserve_format)
            )
            picked = filled[..., :1, None].new_full((2,), math.nan, dtype=torch.complex64, device=torch.device("cpu"))
            return picked * (1 + 2j), torch.zeros(2, layout=torch.strided), torch.einsum("ij,ij->i", x, x)

    model = fxopt.optimize(Constants(), [], example_inputs=(torch.randn(2, 3),))
    x = torch.randn(2, 3)
    for mine, theirs in zip(reloaded(model, tmp_path / "m")(x), model(x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_equal_models_make_equal_files(tmp_path: Path):
    torch.manual_seed(0)
    model, _ = optimized("residual")
    fxopt.save(model, tmp_path / "a", kind="standalone")
    fxopt.save(copy.deepcopy(model), tmp_path / "b", kind="standalone")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_nothing_changes_by_saving(tmp_path: Path):
    model, _ = optimized("attending")
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    flags = {name: module.training for name, module in model.named_modules()}
    fxopt.save(model, tmp_path / "m", kind="standalone")
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: module.training for name, module in model.named_modules()} == flags
    same(model.state_dict(), before)


def test_kinds_and_arguments_that_do_not_go_together(tmp_path: Path):
    model, _ = optimized("tied")
    for options in ({"kind": "zip"}, {"kind": "standalone", "factory": "zoo:build"}):
        with pytest.raises(UsageError, match="use 'recipe', or 'standalone' without a factory"):
            fxopt.save(model, tmp_path / "m", **options)
    fxopt.save(model, tmp_path / "m", kind="standalone")
    with pytest.raises(UsageError, match="holds the whole model, so leave model= out"):
        fxopt.load(tmp_path / "m", model=Tied())
    assert isinstance(fxopt.load(tmp_path / "m", trust=["anything"]), FlatModel)


MEMBERS: dict[str, Callable[[], nn.Module]] = {
    "convolutions and batch norms": lambda: nn.Sequential(
        nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.AvgPool1d(2)
    ),
    "layer norms and dropout": lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.2), nn.GELU()),
    "recurrent layers": lambda: Recurrent(),
    "embeddings": lambda: Embedded(),
}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(8, 3, batch_first=True)

    def forward(self, x):
        return self.recurrent(x)[0]


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, x):
        return self.table(x.long().clamp(0, 8)).softmax(-1)


class Several(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__()
        self.members = nn.ModuleList(make() for _ in range(3))

    def forward(self, x):
        return torch.stack([member(x) for member in self.members])


@pytest.mark.parametrize("name", MEMBERS)
def test_every_kind_of_fused_member(name: str, tmp_path: Path):
    call = fxopt.Inputs(torch.randn(2, 4, 8))
    original = Several(MEMBERS[name])
    model = fxopt.optimize(original, "fuse_ensembles{lowering=bmm}", example_inputs=call, measure=False)
    assert [decision.status for decision in fxopt.plan(model).decisions] == ["applied"]
    flat = reloaded(model, tmp_path / "m")
    for training in (True, False):
        same(run(flat.train(training), call), run(model.train(training), call))
    fxopt.load_state_dict(flat, original.state_dict())
    torch.testing.assert_close(run(flat, call), run(original.eval(), call))
