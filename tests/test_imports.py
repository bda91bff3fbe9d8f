"""What `import fxopt` and an ordinary model load: no library that neither the model nor a pass uses."""

from __future__ import annotations

import subprocess
import sys

import pytest

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

{use}
print(sorted({{"torchao", "torch_geometric", "transformers", "torch._dynamo"}} & sys.modules.keys()))
"""


@pytest.mark.parametrize(
    "use",
    [
        "",
        "print(fxopt.report(fxopt.optimize(Heads().eval(), example_inputs=torch.ones(2, 4), measure=False)))",
        "fxopt.capture(Heads(), torch.ones(2, 4)); fxopt.list_passes()",
    ],
)
def test_libraries_that_nothing_uses_are_not_imported(use: str):
    code = PLAIN.format(use=use)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_fxopt_itself_starts_without_torch():
    code = "import sys, fxopt; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
