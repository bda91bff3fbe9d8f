"""A folder with models for the command line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HEADS = """
import torch
from torch import nn

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(6))

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=1)
"""
"""Source of a module with an ensemble."""


@contextlib.contextmanager
def folder_of_modules(folder: Path, monkeypatch: pytest.MonkeyPatch, **sources: str) -> Iterator[Path]:
    """Work in a folder with modules of these names, which the command line imports from there."""
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield folder
    for name in sources:
        sys.modules.pop(name, None)
