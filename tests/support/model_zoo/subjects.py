"""All models of the zoo as one list: what to call each, and how to make it with its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxopt.demo import DIM_STATE, MultiHead

from . import graphs, named
from .families import SEED, Family, build, drawn, family_of

__all__ = ["Built", "Subject", "candidates", "graph_subjects", "named_subjects"]


@dataclass(frozen=True)
class Built:
    """A model in evaluation mode, and keyword arguments for it in two sizes.

    Attributes:
        details: how it was made, for the record.
    """

    model: nn.Module
    inputs: dict[str, Any]
    second: dict[str, Any]
    details: dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model to look at; making it may fail, for transformers' families by a `BuildError`."""

    name: str
    kind: str
    make: Callable[[], Built]


def candidates(kind: str, seed: int = SEED) -> Iterator[Subject]:
    """Yield the families of a kind in the order drawn; those that cannot be built are to be passed over."""
    for family in drawn(kind, seed):
        yield _of_family(family)


def named_subjects() -> list[Subject]:
    """Return the models that everybody knows by name."""
    own = [Subject(cls.__name__, "named", lambda cls=cls: _of_class(cls)) for cls in (named.ResNet, named.DenseNet)]
    own.append(Subject("MultiHead", "named", _multi_head))
    return own + [_of_family(family_of(name), "named") for name in named.FAMILIES]


def graph_subjects() -> list[Subject]:
    """Return the models on graphs."""
    return [Subject(name, "graph", lambda model=model: _of_graphs(model)) for name, model in graphs.MODELS.items()]


def _of_family(family: Family, kind: str | None = None) -> Subject:
    def make() -> Built:
        member = build(family)
        details = {"class": type(member.model).__name__, "recipe": member.recipe}
        return Built(member.model, member.inputs(2, 12), member.inputs(3, 9), details)

    return Subject(family.name, kind or family.kind, make)


def _of_class(cls: Callable[[], nn.Module]) -> Built:
    torch.manual_seed(0)
    model = cls().eval()
    return Built(
        model, {"x": torch.randn(2, 3, 32, 32)}, {"x": torch.randn(3, 3, 24, 24)}, {"class": type(model).__name__}
    )


def _multi_head() -> Built:
    """Return the 128 parallel heads that the demonstration optimizes."""
    torch.manual_seed(0)
    model = MultiHead(128).eval()
    return Built(model, {"x": torch.randn(1, DIM_STATE)}, {"x": torch.randn(5, DIM_STATE)}, {"class": "MultiHead"})


def _of_graphs(entry: graphs.GraphModel) -> Built:
    torch.manual_seed(0)
    model = entry.make().eval()
    return Built(model, entry.inputs(graphs.NODES), entry.inputs(33), {"class": type(model).__name__})
