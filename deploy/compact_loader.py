"""Load the pruned model whose files lie beside this one; needs torch and safetensors, and the class of the model.

from compact_loader import load
model = load(Model())
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]


def load(model: torch.nn.Module, folder: Path | None = None) -> torch.nn.Module:
    """Give an unpruned model the sizes and the tensors of the pruned one, and return it in evaluation mode."""
    folder = folder or Path(__file__).parent
    sizes: dict[str, Any] = json.loads((folder / "sizes.json").read_text())
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    for name, numbers in sizes.get("gone", {}).items():
        for number in reversed(numbers):
            del cast("Any", model.get_submodule(name))[number]
    for name, value in sizes["attributes"].items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, value if isinstance(value, int) else tuple(value))
    parameters = {name: torch.nn.Parameter(tensor, tensor.is_floating_point()) for name, tensor in tensors.items()}
    for name, stored in {**{name: name for name in tensors}, **sizes["tied"]}.items():
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        is_parameter = last in dict(module.named_parameters(recurse=False))
        setattr(module, last, parameters[stored] if is_parameter else tensors[stored])
    return model.eval()
