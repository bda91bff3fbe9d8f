"""Whether all ranks ask for the same: the same model and passes, and rows where these need them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...compat import modules_by_name
from ...errors import UsageError
from ...runtime.values import tensors_by_name, user_class
from ..contract import Pass
from ..sites import Goal
from .ranks import Ranks

__all__ = ["Asked", "check_alike"]

_MODELS = (
    "; under torch.distributed all ranks optimize one model together. Models that differ (pipeline stages) are "
    "optimized before the process group is initialized, or each by a plan (plan=)"
)


@dataclass(frozen=True)
class Asked:
    """What a rank asks for besides passes."""

    words: Sequence[str]  # what has to be the same on all ranks, as what a rank does
    shapes: Sequence[Sequence[int]]  # of the tensors in the first example call


def check_alike(ranks: Ranks, model: nn.Module, passes: Sequence[Pass], asked: Asked) -> None:
    """Raise UsageError where another rank has another model or asks for something else, or is silent."""
    tensors = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors_by_name(model).items()]
    classes = [(name, user_class(type(module)).__qualname__) for name, module in modules_by_name(model).items()]
    form = hashlib.sha256(repr((tensors, classes)).encode()).hexdigest()
    pipeline = ",".join(map(str, passes))

    def compare(everyone: Sequence[Any]) -> str:
        for rank, (other_form, other_pipeline, words, _) in enumerate(everyone):
            if other_pipeline != pipeline:
                return f"rank {rank} runs the passes {other_pipeline!r}, rank 0 {pipeline!r}{_MODELS}"
            if other_form != form:
                what = f"the modules of rank {rank}'s model have other classes or tensors than those of rank 0"
                return f"{what}{_MODELS}"
            for theirs, mine in zip(words, asked.words, strict=True):
                if theirs != mine:
                    return f"rank {rank} {theirs}, and rank 0 {mine}; all ranks call fxopt.optimize alike"
        return _other_rows(passes, [shapes for *_, shapes in everyone])

    difference = ranks.exchange((form, pipeline, asked.words, asked.shapes), compare)
    if difference:
        raise UsageError(difference)


def _other_rows(passes: Sequence[Pass], shapes: Sequence[Any]) -> str:
    """Say which rank has an example of another form than one that is to get the same rows."""
    for pass_ in (each for each in passes if each.finishes and each.goal is Goal.PARALLEL):
        first = dict[int, int]()
        for rank, own in enumerate(shapes):
            other = first.setdefault(pass_.rows(rank, len(shapes))[0], rank)
            if own != shapes[other]:
                return (
                    f"the example inputs of rank {rank} have the shapes {own}, those of rank {other} {shapes[other]}; "
                    f"{pass_.name!r} needs the same rows on both"
                )
    return ""
