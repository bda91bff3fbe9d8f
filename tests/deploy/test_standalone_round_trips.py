"""Optimized models of every make survive being saved as standalone archives, also where nobody knows their classes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt


class Members(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members])


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.recurrent, self.out = kind(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.recurrent(x)[0])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.attention(x, x, x, need_weights=False)[0] + x)


class Norms(nn.Module):
    """Batch norms behind a convolution, a transposed one and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)
        self.transposed, self.norm_2 = nn.ConvTranspose1d(4, 4, 3), nn.BatchNorm1d(4)
        self.linear, self.norm_3 = nn.Linear(4, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_2(self.transposed(self.norm(self.conv(x)).relu()))
        return self.norm_3(self.linear(y.mean(2)))


@dataclass
class Output:
    y: Tensor
    parts: Any = None


class Odd(nn.Module):
    """Tensors of several types and layouts, tied, constant, kept out of state dicts, and called what no dot takes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.linear, self.tied = nn.Linear(8, 6), nn.Linear(8, 6, bias=False)
        self.linear.weight = nn.Parameter(torch.randn(8, 6).t())
        self.tied.weight = self.linear.weight
        self.brain = nn.Parameter(torch.randn(6, dtype=torch.bfloat16))
        self.long = nn.Parameter(torch.arange(6), requires_grad=False)
        self.constant = torch.arange(6.0)
        self.register_buffer("lambda", torch.ones(1))
        self.register_buffer("sliced", torch.randn(6, 2)[:, 0], persistent=False)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Output:
        y = self.conv(x).relu().mean((2, 3))
        y = self.linear(y) + self.tied(y) + self.constant + self.brain + self.long
        y = y * getattr(self, "lambda") + self.sliced
        if self.training:
            y = y + 1
        return Output(y if scale is None else y * scale, {"rows": y.shape[0], "halves": [y[:, :3], (y[:, 3:],)]})


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3),
        nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2))


def normalised() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose1d(3, 4, 3), nn.InstanceNorm1d(4, affine=True), nn.AvgPool1d(2))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype]] = {
    "mlp members": (lambda: Members(mlp), (5, 4), torch.float32),
    "bfloat16 members": (lambda: Members(mlp), (5, 4), torch.bfloat16),
    "convolution members with norms": (lambda: Members(cnn), (2, 3, 8, 8), torch.float32),
    "LSTM members": (lambda: Members(lambda: Recurrent(nn.LSTM)), (2, 6, 4), torch.float32),
    "GRU members": (lambda: Members(lambda: Recurrent(nn.GRU)), (2, 6, 4), torch.float32),
    "attention members": (lambda: Members(Attending), (2, 6, 4), torch.float32),
    "members with instance norms": (lambda: Members(normalised), (2, 3, 9), torch.float32),
    "folded norms": (Norms, (2, 3, 9), torch.float32),
    "folded norms in float64": (Norms, (2, 3, 9), torch.float64),
}


def given(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model whose norms have seen something, and arguments of two batch sizes."""
    make, shape, dtype = CASES[name]
    model, x = make().to(dtype), torch.randn(shape).to(dtype)
    model(x * 2 + 1)
    return model.eval(), x, torch.randn(shape[0] + 3, *shape[1:]).to(dtype)


@pytest.mark.parametrize("name", CASES)
def test_models_after_the_inference_preset(name: str, tmp_path: Path) -> None:
    model, x, more = given(name)
    fast = fxopt.optimize(model, "inference", example_inputs=(x,), measure=False)
    assert any(decision.status == "applied" for decision in fxopt.plan(fast).decisions)
    fxopt.save(fast, tmp_path / "m", kind="standalone")
    flat = fxopt.load(tmp_path / "m")
    assert list(flat.state_dict()) == list(fast.state_dict())
    for inputs in (x, more, x[:1]):
        assert torch.equal(flat(inputs), fast(inputs))
    # Checkpoints from before the rewrite load, and mean the same.
    other = given(name)[0]
    flat.load_state_dict(other.state_dict())
    fast.load_state_dict(other.state_dict())
    assert torch.equal(flat(more), fast(more))


SCRIPT = """
import sys
from pathlib import Path
import safetensors.torch
import torch
import fxopt

torch.set_num_threads(1)
for path in map(Path, sys.argv[1:]):
    case = safetensors.torch.load_file(path.with_suffix(".safetensors"))
    print(path.stem, torch.equal(fxopt.load(path)(case["x"]), case["y"]))
"""


def test_they_load_where_nobody_knows_their_classes(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    paths = []
    for name in CASES:
        model, x, more = given(name)
        fast = fxopt.optimize(model, "inference", example_inputs=(x,), measure=False)
        paths.append(tmp_path / f"{name.replace(' ', '_')}.fxopt")
        fxopt.save(fast, paths[-1], kind="standalone")
        save_file({"x": more, "y": fast(more).detach().contiguous()}, paths[-1].with_suffix(".safetensors"))
    command = [sys.executable, "-c", SCRIPT, *map(str, paths)]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert [line.split()[1] for line in finished.stdout.splitlines()] == ["True"] * len(CASES)


@pytest.mark.parametrize("training", [False, True])
def test_odd_tensors_and_structured_outputs(training: bool, tmp_path: Path) -> None:
    model, x = Odd().train(training), torch.randn(2, 3, 8, 8)
    scale = torch.tensor(2.0)
    program = fxopt.capture(model, [(x,), (x, scale)])
    fxopt.save(program.model, tmp_path / "m", kind="standalone")
    flat = fxopt.load(tmp_path / "m")
    for name, tensor in model.state_dict(keep_vars=True).items():
        found = flat.state_dict(keep_vars=True)[name]
        assert torch.equal(found, tensor)
        assert (found.dtype, found.stride(), found.requires_grad) == (
            tensor.dtype, tensor.stride(), tensor.requires_grad,
        )  # fmt: skip
    assert list(flat.state_dict()) == list(model.state_dict())
    assert flat.tied.weight is flat.linear.weight
    for mode in (training, not training):
        for arguments in ((x,), (torch.randn(5, 3, 8, 8), scale)):
            expected, result = model.train(mode)(*arguments), flat.train(mode)(*arguments)
            assert torch.equal(result["y"], expected.y)
            assert result["parts"]["rows"] == arguments[0].shape[0]
            assert torch.equal(result["parts"]["halves"][1][0], expected.parts["halves"][1][0])
