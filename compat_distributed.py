"""Every private or version-dependent API of torch's distributed package that fxopt uses, in alphabetical order."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, distributed, nn
from torch.nn.modules._functions import SyncBatchNorm as _SyncBatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

__all__ = ["BatchNorm", "shard_again", "shared_store", "sync_batch_norm"]


class BatchNorm(_BatchNorm):
    """What the batch norms of torch have in common."""


def shard_again(module: nn.Module) -> None:
    """Let FSDP2 free what it gathered of a module's own tensors for a forward, as it does before it saves them."""
    for hook in module.__dict__["_state_dict_pre_hooks"].values():
        if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
            hook()


def shared_store(prefix: str) -> Any:
    """Return the store through which the ranks of the default process group found each other, below a prefix."""
    from torch.distributed import distributed_c10d as c10d

    return c10d.PrefixStore(prefix, c10d._get_default_store())  # pyright: ignore[reportPrivateUsage]


def sync_batch_norm(
    x: Tensor,
    affine: tuple[Tensor | None, Tensor | None],
    running: tuple[Tensor | None, Tensor | None],
    eps: float,
    momentum: float,
) -> Tensor:
    """Normalize by the statistics of all ranks with the kernels of `nn.SyncBatchNorm`, which no CPU has."""
    apply: Any = cast("Any", _SyncBatchNorm).apply
    return apply(x, *affine, *running, eps, momentum, distributed.group.WORLD, distributed.get_world_size())
