"""The graphs that run in evaluation, the tensors that they read, and those that they derive from them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ...compat import own_tensor
from ...operators import Derived
from ...tracing.program import Program, is_called

__all__ = ["computed", "graphs_in"]


def graphs_in(program: Program) -> Iterator[tuple[str, int, fx.Graph]]:
    """Yield owner, number and graph of all that run in evaluation; of a model in training, all that are called."""
    for owner, capture in program.captures.items():
        if is_called(program, owner):
            module = program.module(owner)
            for number, specialization in enumerate(capture.specializations):
                if program.training or specialization.runs_in_mode(module):
                    yield owner, number, specialization.graph


def computed(program: Program, owner: str, read: str | fx.Node | None) -> Tensor | None:
    """Return a tensor by its name or by the node that reads or derives it; None where that hangs on more."""
    if read is None:
        return None
    if isinstance(read, str):
        return _named(program, owner, read)
    if read.op == "get_attr":
        return _named(program, owner, str(read.target))
    if read.target is operator.getitem and isinstance(read.args[0], fx.Node):
        made = _derived(program, owner, read.args[0])
        return None if made is None else made[read.args[1]]
    return None


def _derived(program: Program, owner: str, node: fx.Node) -> Any:
    if not isinstance(node.target, Derived):
        return None
    reads = [each for each in node.args if isinstance(each, fx.Node)]
    originals = [tensor for tensor in (computed(program, owner, each) for each in reads) if tensor is not None]
    if len(originals) < len(node.args):
        return None
    with torch.no_grad():
        return node.target(*originals)


def _named(program: Program, owner: str, path_and_name: str) -> Tensor | None:
    path, _, name = path_and_name.rpartition(".")
    try:
        module = program.module(owner).get_submodule(path)
    except AttributeError:
        return None
    return own_tensor(module, name)
