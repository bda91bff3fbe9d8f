"""Which of training and evaluation a rewrite must be checked in."""

from __future__ import annotations

from torch import nn

from ...compat import all_modules
from ...runtime.graphs import capture_of
from ...runtime.values import user_class
from ..sites import Phase

__all__ = ["depends_on_mode", "is_mixed", "modes_to_check"]

_STEADY = (
    nn.Linear, nn.Bilinear, nn.Identity, nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm,
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Flatten,
    nn.Unflatten, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.ReLU, nn.GELU, nn.Tanh,
    nn.Sigmoid, nn.SiLU, nn.ELU, nn.Softmax, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
)  # fmt: skip


def depends_on_mode(module: nn.Module) -> bool:
    """Say whether a module may compute something else in training than in evaluation."""
    return any(_reads_mode(submodule) for submodule in all_modules(module))


def _reads_mode(module: nn.Module) -> bool:
    capture = capture_of(module)
    if capture is not None:
        graphs = [specialization.graph for specialization in capture.specializations]
        return len(graphs) > 1 or any(
            node.op == "get_attr" and str(node.target).endswith("training") for graph in graphs for node in graph.nodes
        )
    base = user_class(type(module))
    if base in (nn.MultiheadAttention, nn.RReLU):
        return True
    return base not in _STEADY and base.__module__ != "torch.nn.modules.activation"


def is_mixed(module: nn.Module) -> bool:
    """Say whether some submodules are in training mode and others are not."""
    return len({submodule.training for submodule in all_modules(module)}) > 1


def modes_to_check(module: nn.Module, phase: Phase, training: bool) -> list[bool | None]:
    """Return the modes for verification: True for training, False for evaluation, None for the flags as they are."""
    if is_mixed(module):
        return [None]
    modes: list[bool | None] = [mode for mode in (training, not training) if _covers(phase, mode)]
    return modes if depends_on_mode(module) else modes[:1]


def _covers(phase: Phase, training: bool) -> bool:
    return phase.covers_training if training else phase.covers_evaluation
