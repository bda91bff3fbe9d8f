"""What `import fxopt` and an ordinary model load: no library that neither the model nor a pass uses."""

from __future__ import annotations

import subprocess
import sys

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


def in_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_libraries_that_nothing_uses_are_not_imported():
    *report, loaded = in_new_process(PLAIN).splitlines()
    assert "rewrites applied" in report[0]
    assert loaded == "[]"


def test_fxopt_itself_starts_without_torch():
    assert in_new_process("import sys, fxopt; print('torch' in sys.modules)") == "False\n"


def test_layers_and_operators_are_reached_by_importing_fxopt_alone():
    code = "import fxopt; print(callable(fxopt.layers.RBM), callable(fxopt.cuda_ops.add))"
    assert in_new_process(code) == "True True\n"
