"""What a pruned module is equal to: the original with zeros in the place of what is gone."""

from __future__ import annotations

import torch
from torch import nn

from ....compat import own_tensor
from ....passes.sites import Site
from .fewer_experts import without_experts
from .kept_statistics import over_kept

__all__ = ["with_zeros"]


def with_zeros(site: Site, original: nn.Module) -> nn.Module:
    """Put zeros in the place of what a site removes; norms over its units take their statistics over the kept ones,
    and routers give no token to experts that are gone.

    Args:
        site: says what is removed.
        original: a copy of the module around the site as it was.
    """
    lists = site.data["lists"]
    for name, dim, size, number in site.data["tensors"]:
        path, _, last = name.rpartition(".")
        tensor = own_tensor(original.get_submodule(path), last)
        gone = sorted(set(range(size)) - set(lists[number]))
        if tensor is not None:
            tensor.data.index_fill_(dim, torch.tensor(gone, device=tensor.device), 0)
    if site.data["norms"]:
        _leave_fast_paths(original)
    for module, size, number in site.data["norms"]:
        over_kept(original.get_submodule(module), size, lists[number])
    for module, size, number in site.data["routers"]:
        without_experts(original.get_submodule(module), size, lists[number])
    return original


def _leave_fast_paths(model: nn.Module) -> None:
    """Let encoder layers of torch call their norms, which one operator computes by itself in evaluation."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            vars(module)["activation_relu_or_gelu"] = 0
