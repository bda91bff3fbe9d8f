"""`fxopt.export`: a `.pt2` file that runs without the user's code, compared before it is there."""

from __future__ import annotations

import copy
import hashlib
import io
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.deploy import export
from fxopt.errors import ArchiveError, InputError, UsageError


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)) for _ in range(5)
        )

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=1)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.classifier = nn.Linear(4, 3)
        self.register_buffer("shift", torch.tensor(0.5), persistent=False)
        self.offset = torch.arange(3.0)

    def forward(self, images, mask=None):
        x = F.relu(self.norm(self.stem(images)))
        pooled = F.dropout(F.adaptive_avg_pool2d(x, 1).flatten(1), 0.5, self.training)
        return {"logits": self.classifier(pooled) + self.shift + self.offset, "parts": (pooled, [x], None)}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids))), ids + 1


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Nested(nn.Module):
    def forward(self, inputs, *, extra, factor=2.0, flag=True):
        first, rest = inputs
        return (first + rest[0]) * factor + extra["bias"] if flag else first


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.recurrent = nn.LSTM(8, 6, batch_first=True)

    def forward(self, x, mask=None):
        return self.recurrent(self.encoder(x, src_key_padding_mask=mask))[0]


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "heads": (Heads, (torch.randn(3, 4),)),
    "residual": (Residual, {"images": torch.randn(2, 3, 8, 8)}),
    "one row": (Residual, (torch.randn(1, 3, 8, 8),)),
    "tied": (Tied, (torch.randint(0, 11, (2, 5)),)),
    "counting": (Counting, (torch.randn(2, 3),)),
    "nested": (
        Nested,
        fxopt.Inputs((torch.randn(2, 3), [torch.randn(2, 3)]), extra={"bias": torch.randn(3)}, factor=3.0),
    ),
    "noisy": (Noisy, (torch.randn(2, 3),)),
    "attending": (Attending, (torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool))),
    "double": (lambda: Heads().double(), (torch.randn(3, 4, dtype=torch.float64),)),
    "half": (lambda: Heads().bfloat16(), (torch.randn(3, 4, dtype=torch.bfloat16),)),
}


def exported(model: nn.Module, path: Path, inputs: Any, **options: Any) -> nn.Module:
    fxopt.export(model, path, inputs, **options)
    return fxopt.load(path)


def run(model: nn.Module, inputs: Any) -> Any:
    call = inputs if isinstance(inputs, fxopt.Inputs) else fxopt.Inputs(
        *(() if isinstance(inputs, dict) else inputs), **(inputs if isinstance(inputs, dict) else {})
    )  # fmt: skip
    torch.manual_seed(3)
    return copy.deepcopy(model)(*call.args, **call.kwargs)


def with_rows(inputs: Any, rows: int) -> Any:
    """Return inputs, one tensor, with another batch size."""
    x = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs[0]
    more = x.repeat(rows, *[1] * (x.dim() - 1))[:rows]
    return dict.fromkeys(inputs, more) if isinstance(inputs, dict) else (more,)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("passes", [None, "inference"])
@pytest.mark.filterwarnings(r"ignore:m.pt2 draws random numbers \(rand_like\):UserWarning")
def test_the_file_gives_what_the_model_gives_at_any_batch_size(name: str, passes: str | None, tmp_path: Path):
    make, inputs = MODELS[name]
    model = make().eval()
    if passes is not None:
        model = fxopt.optimize(model, passes, example_inputs=inputs, measure=False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    loaded = exported(model, tmp_path / "m.pt2", inputs)
    torch.testing.assert_close(run(loaded, inputs), run(model, inputs))
    names = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    assert {name for name in loaded.state_dict() if not name.startswith("folded_")} <= names
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.pt2", "m.pt2.sha256"]
    for rows in (1, 2, 9) if name in ("heads", "residual", "one row", "tied") else ():
        call = with_rows(inputs, rows)
        torch.testing.assert_close(run(loaded, call), run(model, call))


@pytest.mark.parametrize("lowering", ["wide", "bmm", "grouped_conv", "vmap", "loop"])
def test_fused_ensembles(lowering: str, tmp_path: Path):
    model, x = Heads(), torch.randn(3, 4)
    fast = fxopt.optimize(model, f"fuse_ensembles{{lowering={lowering}}}", example_inputs=(x,), measure=False)
    loaded = exported(fast, tmp_path / "m.pt2", (x,))
    assert fast.training, "the model's mode is its own"
    torch.testing.assert_close(loaded(torch.ones(7, 4)), model.eval()(torch.ones(7, 4)))
    torch.testing.assert_close(fast.train()(x).shape, (3, 10))
    assert fxopt.report(fast).to_json()["missed"] == []


def test_folded_norms_are_exported_and_stay_usable(tmp_path: Path):
    model, x = Residual().eval(), torch.randn(2, 3, 8, 8)
    model.norm.running_mean.uniform_()
    fast = fxopt.optimize(model, "fold_batchnorm", example_inputs=(x,), measure=False)
    assert "applied" in str(fxopt.plan(fast).to_json())
    loaded = exported(fast, tmp_path / "m.pt2", (x,))
    for each in (loaded, fast):
        torch.testing.assert_close(run(each, (x,)), run(model, (x,)))


def test_sizes_that_differ_between_calls_are_free(tmp_path: Path):
    model = Tied().eval()
    calls = [(torch.randint(0, 11, (2, 5)),), (torch.randint(0, 11, (3, 7)),)]
    loaded = exported(model, tmp_path / "m.pt2", calls)
    ids = torch.randint(0, 11, (4, 9))
    torch.testing.assert_close(loaded(ids), model(ids))


def test_other_sizes_are_those_of_the_example(tmp_path: Path):
    x = torch.randint(0, 11, (2, 5))
    free, fixed = (
        exported(Tied(), tmp_path / "m.pt2", (x,)),
        exported(Tied(), tmp_path / "m.pt2", (x,), dynamic_batch=False),
    )
    free(x.repeat(3, 1))
    for module, refused in ((free, x[:, :4]), (fixed, x.repeat(3, 1))):
        with pytest.raises(AssertionError, match="Guard failed"):
            module(refused)


class Four(nn.Module):
    def forward(self, x):
        return x.view(4, 3)


class Single(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[0] == 1 else x


class Large(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[0] > 2 else x


class Deciding(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 0 else -x


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Four(), r"its code fixes x\.shape\[0\] to 4, but the batch size must be free; give dynamic_batch=False"),
        (Single(), r"with 1 row, the exported model differs from the model: output differs: .*dynamic_batch=False"),
        (Large(), r"with 1 row, the exported model raises AssertionError: Guard failed: x\.size\(\)\[0\] >= 3"),
    ],
)
def test_a_batch_size_that_is_not_free_is_named(model: nn.Module, reason: str, tmp_path: Path):
    x = torch.randn(4, 3)
    (tmp_path / "m.pt2").write_bytes(b"old")
    with pytest.raises(ArchiveError, match=reason):
        fxopt.export(model, tmp_path / "m.pt2", (x,))
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt2"]
    assert (tmp_path / "m.pt2").read_bytes() == b"old"
    torch.testing.assert_close(exported(model, tmp_path / "m.pt2", (x,), dynamic_batch=False)(x), model(x))


def test_what_torch_refuses_is_said_in_one_line(tmp_path: Path):
    with pytest.raises(ArchiveError, match=r"cannot export this Deciding: \w+: Could not guard .* \(at \w+\.py:\d+\)$"):
        fxopt.export(Deciding(), tmp_path / "m.pt2", (torch.randn(3, 3),))
    assert not list(tmp_path.iterdir())


@dataclass
class Found:
    first: Tensor
    second: Tensor | None = None


class Point(NamedTuple):
    x: Tensor
    y: Tensor


class Giving(nn.Module):
    def __init__(self, output: Callable[[Tensor], Any]):
        super().__init__()
        self.output = output

    def forward(self, x):
        return self.output(x)


def test_outputs_are_plain_containers(tmp_path: Path):
    x = torch.randn(2, 3)
    given = {
        lambda x: Found(x + 1): {"first": x + 1, "second": None},
        lambda x: [Point(x, x * 2), Found(x, x)]: [(x, x * 2), {"first": x, "second": x}],
        lambda x: (x.max(dim=1), x.shape[0], None): ((*x.max(dim=1),), 2, None),
    }
    for output, expected in given.items():
        loaded = exported(Giving(output), tmp_path / "m.pt2", (x,))
        torch.testing.assert_close(loaded(x), expected)
    with pytest.raises(ArchiveError, match=r"output\['a'\]\[1\] is a device; an exported file takes tensors"):
        fxopt.export(Giving(lambda x: {"a": (x, x.device)}), tmp_path / "m.pt2", (x,))


def test_inputs_that_do_not_do(tmp_path: Path):
    x, path = torch.randn(2, 3), tmp_path / "m.pt2"
    for inputs, reason in (
        (None, "give example inputs"),
        ((Found(x),), r"example call 0: argument 0 is a Found; an exported file takes tensors"),
        ({"x": [x, Point(x, x)]}, r"example call 0: argument 'x'\[1\] is a Point"),
        ([(x,), {"x": x}], "example call 1 has other arguments than call 0"),
        ([(x,), (x.double(),)], "example call 1 has other arguments than call 0"),
    ):
        with pytest.raises(UsageError, match=reason):
            fxopt.export(Giving(lambda x: x), path, inputs)
    with pytest.raises(InputError, match="raises ZeroDivisionError on example call 0: division by zero"):
        fxopt.export(Giving(lambda x: x * (1 / 0)), path, (x,))
    with pytest.raises(InputError, match=r"'heads\.0\.0\.weight' is on the meta device"):
        fxopt.export(Heads().to("meta"), path, (x,))
    freed = fxopt.optimize(nn.Sequential(nn.Linear(3, 512)).eval(), "pack,release", example_inputs=(x,), measure=False)
    with pytest.raises(InputError, match=r"'0\.weight' was freed by 'release'; export the model as it was before"):
        fxopt.export(freed, path, (x,))
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="No such file"):
        fxopt.export(Heads(), tmp_path / "absent" / "m.pt2", (torch.randn(2, 4),))


def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("fxopt.storage.open", lambda *_, **__: Full(), raising=False)
    with pytest.raises(OSError, match=r"No space left on device: '.*m\.pt2'"):
        fxopt.export(Heads(), tmp_path / "m.pt2", (torch.randn(2, 4),))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", ["value", "shape", "dtype", "structure", "integer"])
def test_a_file_that_gives_something_else_is_not_written(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    changes: dict[str, Callable[[Any], Any]] = {
        "value": lambda out: (out[0] * (1 + 1e-5), out[1]),
        "shape": lambda out: (out[0][None], out[1]),
        "dtype": lambda out: (out[0].double(), out[1]),
        "structure": lambda out: list(out)[:1],
        "integer": lambda out: (out[0], out[1] + 1),
    }
    read = export.load_exported

    def other(path: Path) -> Any:
        module, inputs = read(path)
        module.register_forward_hook(lambda _, __, output: changes[change](output))
        return module, inputs

    monkeypatch.setattr(export, "load_exported", other)
    (tmp_path / "m.pt2").write_bytes(b"old")
    with pytest.raises(ArchiveError, match=r"m\.pt2 was not written: on example call 0, the exported model"):
        fxopt.export(Tied().eval(), tmp_path / "m.pt2", (torch.randint(0, 11, (2, 5)),))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("m.pt2", b"old")]


def test_the_model_is_left_as_it_is(tmp_path: Path):
    model = nn.Sequential(Heads(), nn.Dropout(0.5)).train()
    model[0].heads[1].eval()
    x = torch.randn(2, 4, requires_grad=True)
    flags, state = [module.training for module in model.modules()], torch.get_rng_state()
    loaded = exported(model, tmp_path / "m.pt2", (x,))
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(vars(x))
    assert not model._forward_hooks
    assert x.grad is None
    torch.testing.assert_close(loaded(x), model.eval()(x))
    with torch.inference_mode():
        exported(model, tmp_path / "m.pt2", (torch.randn(2, 4),))


def test_gradients_flow_through_the_file(tmp_path: Path):
    model, x = Heads().eval(), torch.randn(3, 4)
    with torch.no_grad():
        loaded = exported(model, tmp_path / "m.pt2", (x,))
    loaded(x).sum().backward()
    model(x).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name).grad, parameter.grad)


def test_tied_weights_are_stored_once(tmp_path: Path):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(200, 200, bias=False), nn.Linear(200, 200, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    exported(Wide(), tmp_path / "m.pt2", (torch.randn(2, 200),))
    assert (tmp_path / "m.pt2").stat().st_size < 1.5 * 4 * 200 * 200


FRESH = """
import sys
import torch, fxopt
(args, expected) = torch.load(sys.argv[2])
torch.testing.assert_close(fxopt.load(sys.argv[1])(*args), expected)
assert not any(name.startswith(("test_export", "transformers")) for name in sys.modules), "imported the user's code"
"""


def operators(path: Path) -> list[str]:
    """Return the operators of the program in a file, in order."""
    return [str(node.target) for node in torch.export.load(path).graph.nodes if node.op == "call_function"]


def test_what_is_made_of_parameters_alone_is_computed_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model[1].running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 6, 6)
    fast = fxopt.optimize(model.eval(), "fold_batchnorm", example_inputs=x, measure=False)
    fxopt.export(fast, tmp_path / "m.pt2", x)
    assert operators(tmp_path / "m.pt2") == ["aten.conv2d.default", "aten.relu.default"]
    loaded = fxopt.load(tmp_path / "m.pt2")
    assert sorted(loaded.state_dict()) == ["folded_0", "folded_1"]  # nothing reads the others any more
    torch.testing.assert_close(loaded(x), model(x))


def test_static_int8_is_exported_as_runtimes_know_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 8)).eval()
    x = torch.randn(2, 3, 6, 6)
    fast = fxopt.optimize(model, "quantize{scheme=int8_static}", example_inputs=x, measure=False, verify=False)
    fxopt.export(fast, tmp_path / "m.pt2", x)
    found = [
        name.partition(".")[2] for name in operators(tmp_path / "m.pt2") if name.startswith("quantized_decomposed")
    ]
    rounded = ["quantize_per_tensor.default", "dequantize_per_tensor.default"]
    assert sorted(found) == sorted([*rounded, "dequantize_per_channel.default"] * 3)
    loaded = fxopt.load(tmp_path / "m.pt2")
    error = (loaded(x) - model(x)).abs().max() / model(x).abs().max()
    assert 0 < error < 0.1
    weights = [tensor for tensor in loaded.state_dict().values() if tensor.dim() > 1]
    assert {tensor.dtype for tensor in weights} == {torch.int8}


def test_weights_in_few_bits_stay_in_few_bits(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).eval(), torch.randn(4, 64)
    fast = fxopt.optimize(model, "quantize", example_inputs=x, measure=False)
    fxopt.export(fast, tmp_path / "m.pt2", x)
    loaded = fxopt.load(tmp_path / "m.pt2")
    assert [t.dtype for t in loaded.state_dict().values() if t.dim() == 2] == [torch.int8, torch.int8]


def test_what_is_larger_or_random_or_changed_is_computed_at_each_call(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.seen = nn.Parameter(torch.ones(3, 1)), nn.Buffer(torch.zeros(1))
            self.table = nn.Parameter(torch.ones(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            wide = self.scale * self.scale.t()
            return x @ wide * (self.seen * 2) + self.table.exp().sum(0) + self.table.t()[0].sum()

    model, x = Counting().eval(), torch.randn(2, 3)
    fxopt.export(model, tmp_path / "m.pt2", x)
    found = operators(tmp_path / "m.pt2")
    assert "aten.exp.default" not in found and found.count("aten.mul.Tensor") == 3
    loaded = fxopt.load(tmp_path / "m.pt2")
    for _ in range(2):
        torch.testing.assert_close(loaded(x), model(x))


def test_the_file_needs_no_code_of_the_users(tmp_path: Path):
    model, x = Heads().eval(), torch.randn(3, 4)
    fast = fxopt.optimize(model, "fuse_ensembles{lowering=bmm}", example_inputs=(x,), measure=False)
    fxopt.export(fast, tmp_path / "m.pt2", (x,))
    torch.save(((x,), model(x)), tmp_path / "case.pt")
    arguments = [sys.executable, "-c", FRESH, str(tmp_path / "m.pt2"), str(tmp_path / "case.pt")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


SMALL = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 19}


@pytest.mark.filterwarnings("ignore")
def test_models_of_transformers(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    calls = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        for ids in (torch.randint(0, 99, (2, 7)), torch.randint(0, 99, (3, 5)))
    ]
    fast = fxopt.optimize(model, "inference", example_inputs=calls, measure=False)
    loaded = exported(fast, tmp_path / "m.pt2", calls)
    for call in calls:
        found = loaded(**call)
        assert type(found) is dict
        torch.testing.assert_close(found, dict(model(**call)))
    caching = {"input_ids": calls[0]["input_ids"]}
    with pytest.warns(
        UserWarning, match=r"m\.pt2 gives no cache: past_key_values among the model's results is left out"
    ):
        fxopt.export(model, tmp_path / "m.pt2", caching)
    torch.testing.assert_close(fxopt.load(tmp_path / "m.pt2")(**caching), {"logits": model(**caching).logits})


def test_a_model_that_draws_random_numbers_is_exported_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"draws random numbers \(rand_like\)") as warned:
        fxopt.export(Noisy(), tmp_path / "noisy.pt2", (torch.randn(2, 3),))
    assert "\n" not in str(warned[0].message)
    assert warned[0].filename == __file__


def test_a_damaged_file_is_told_by_the_checksum_beside_it(tmp_path: Path):
    path, beside = tmp_path / "m.pt2", tmp_path / "m.pt2.sha256"
    fxopt.export(Heads().eval(), path, torch.randn(3, 4))
    whole = path.read_bytes()
    assert beside.read_text() == f"{hashlib.sha256(whole).hexdigest()}  m.pt2\n"
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(ArchiveError, match="is damaged: it does not have the checksum"):
        fxopt.load(path)
    beside.write_text("something else\n")
    with pytest.raises(ArchiveError, match="is not a checksum as sha256sum writes it"):
        fxopt.load(path)
    fxopt.export(Heads().eval(), path, torch.randn(3, 4))
    fxopt.load(path)
    beside.unlink()
    fxopt.load(path)
