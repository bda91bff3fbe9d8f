"""What `import fxopt` and an ordinary model load: no library that neither the model nor a pass uses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxopt

PLAIN = """
import sys
import torch
from torch import nn
import fxopt

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))

    def forward(self, x):
        return torch.stack([head(x) for head in self.heads])

fxopt.capture(Heads(), torch.ones(2, 4))
print(fxopt.report(fxopt.optimize(Heads().eval(), example_inputs=torch.ones(2, 4), measure=False)))
fxopt.list_passes()
print(sorted({"torchao", "torch_geometric", "transformers", "torch._dynamo"} & sys.modules.keys()))
"""


def in_new_process(code: str, *arguments: str) -> str:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True).stdout


def test_libraries_that_nothing_uses_are_not_imported():
    *report, loaded = in_new_process(PLAIN).splitlines()
    assert "rewrites applied" in report[0]
    assert loaded == "[]"


def test_fxopt_itself_starts_without_torch():
    assert in_new_process("import sys, fxopt; print('torch' in sys.modules)") == "False\n"


def test_layers_and_operators_are_reached_by_importing_fxopt_alone():
    code = "import fxopt; print(callable(fxopt.layers.RBM), callable(fxopt.cuda_ops.add))"
    assert in_new_process(code) == "True True\n"


ROOMS = """
import importlib, pkgutil, sys
for name in ("runtime", "layers", "cuda_ops", "operators"):
    room = importlib.import_module(f"fxopt.{name}")
    for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
        if not module.name.rpartition(".")[2].startswith("triton_"):
            importlib.import_module(module.name)
print(sorted(name for name in sys.modules if name.startswith(COMPILER)))
"""
COMPILER = 'COMPILER = tuple(f"fxopt.{name}" for name in ("passes", "tracing", "transforms", "reporting", "deploy"))\n'


def test_what_runs_in_a_users_call_needs_no_compiler():
    assert in_new_process(COMPILER + ROOMS) == "[]\n"


def test_a_quantized_layer_needs_few_files():
    code = (
        "import importlib, sys; importlib.import_module(sys.argv[1])\n"
        "print(sum(name.startswith('fxopt') for name in sys.modules))"
    )
    assert int(in_new_process(code, "fxopt" + ".layers.quantized.linear")) <= FILES_OF_A_LAYER


FILES_OF_A_LAYER = 87
"""It takes 81; before the runtime stood apart from the compiler it took 103."""


class Classifier(nn.Module):
    """Has what each of the passes below rewrites."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        features = torch.relu(self.norm(self.stem(x))).mean((2, 3))
        return torch.stack([head(features) for head in self.heads])


UNPICKLED = """
import pickle, sys, torch
model, x, expected = torch.load(sys.argv[1], weights_only=False)
with torch.no_grad():
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
model.load_state_dict(model.state_dict())
pickle.dumps(model)
print(sorted(name for name in sys.modules if name.startswith(COMPILER)))
"""


@pytest.mark.parametrize("name", ["fuse_ensembles", "pack", "fold_batchnorm", "quantize", "flatten_calls", "autocast"])
def test_an_unpickled_model_needs_no_compiler(name: str, tmp_path: Path):
    model, x = Classifier().eval(), torch.randn(16, 3, 8, 8)
    fast = fxopt.optimize(model, name, example_inputs=x, measure=False)
    assert any(decision.status == "applied" for decision in fxopt.plan(fast).decisions)
    with torch.no_grad():
        torch.save((fast, x, fast(x)), tmp_path / "model.pt")
    code = f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n" + COMPILER + UNPICKLED
    assert in_new_process(code, str(tmp_path / "model.pt")) == "[]\n"
