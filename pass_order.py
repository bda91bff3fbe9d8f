"""In which order fxopt's own passes run: one table. Passes of others say theirs by attributes; see `Pass`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["ORDER", "Order"]


@dataclass(frozen=True)
class Order:
    """The rules of one pass: names of others that may not run before it, behind it, without it, or any more."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    destroys: Mapping[str, str] = field(default_factory=dict[str, str])  # each with the reason
    destroys_later: bool = False  # in a later call of `optimize`, too
    includes: tuple[str, ...] = ()  # whose work it does; listed before it they run behind it, on the rest


def _all(names: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


_OWN_PARTS = "each process has another part of the {}; leave ddp out"

ORDER: Mapping[str, Order] = MappingProxyType(
    {
        # what later passes need as it was
        "sync_batchnorm": Order(before=("fuse_ensembles",)),  # fused members are called no more
        "prune": Order(
            before=("fold_batchnorm", "fuse_ensembles", "qat", "quantize"),
            includes=("pack",),  # which packs what prune leaves in float32
        ),
        "qat": Order(before=("quantize", "ddp", "fsdp")),
        "fold_batchnorm": Order(before=("fuse_ensembles",)),
        "graph_pooling": Order(before=("quantize", "ddp", "fsdp")),
        "attention": Order(before=("pack", "autocast", "ddp", "fsdp", "pipeline")),
        # how layers are computed
        "autocast": Order(includes=("pack",)),  # which packs what autocast leaves in float32
        "quantize": Order(  # with its options it says more of fold_batchnorm
            destroys={
                **_all("prune fuse_ensembles qat", "it works on the weights as they were"),
                **_all("fsdp tensor_parallel parallel", "layers with small numbers cannot be split over processes"),
            },
            includes=("sparse_message_passing", "flatten_calls", "pack"),  # for what it leaves
        ),
        "pack": Order(
            after=("fold_batchnorm", "fuse_experts", "fuse_ensembles", "swap_kernels"),
            destroys=_all("prune quantize qat autocast", "it works on layers as they were before pack"),
            destroys_later=True,
        ),
        "sparse_message_passing": Order(
            before=("ddp", "fsdp", "pipeline"),
            after=("prune", "qat", "quantize", "graph_pooling", "fuse_ensembles"),
        ),
        "channels_last": Order(after=("fold_batchnorm", "fuse_experts", "fuse_ensembles", "prune", "qat", "pack")),
        "flatten_calls": Order(
            after=(
                "eliminate_common_subexpressions", "fold_constants", "fold_batchnorm", "fuse_experts",
                "fuse_ensembles", "swap_kernels", "pack", "autocast", "quantize", "qat", "prune", "graph_pooling",
                "sync_batchnorm",
            )
        ),
        "delegate": Order(
            after=(
                "eliminate_common_subexpressions", "fold_constants", "eliminate_dead_code", "fold_batchnorm",
                "fuse_experts", "fuse_ensembles", "swap_kernels", "sparse_message_passing", "quantize", "qat", "prune",
                "graph_pooling",
            )
        ),
        # several processes: before and destroys of one pass mean that the two never go together
        "ddp": Order(
            before=("tensor_parallel", "pipeline"),
            destroys={"tensor_parallel": _OWN_PARTS.format("parameters"), "pipeline": _OWN_PARTS.format("model")},
        ),
        "fsdp": Order(before=("ddp",), destroys={"ddp": "fsdp averages gradients over the processes already"}),
        "tensor_parallel": Order(
            before=("ddp", "fsdp"), destroys=_all("ddp fsdp", "all processes have the same rows; use parallel{...}")
        ),
        "parallel": Order(
            before=("ddp", "fsdp", "tensor_parallel", "pipeline"),
            destroys=_all("ddp fsdp tensor_parallel pipeline", "it has an option for each of them"),
        ),
    }
)  # fmt: skip
"""Pass -> its rules, those of passes that change the model most first. Passes that are not here run anywhere."""
