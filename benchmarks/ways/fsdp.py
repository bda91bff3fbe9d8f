"""Sharded training: `fully_shard` of each block and the root by hand, and the pass `fsdp`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from .models import Make, bert, gpt2, resnet
from .steps import by_pass, training_step
from .way import Step, Way

Blocks = Callable[[Any], Sequence[nn.Module]]


def _way(name: str, make: Make, blocks: Blocks) -> Way:
    return Way(f"fsdp, {name}", lambda: _by_hand(make, blocks), lambda: by_pass(make, "fsdp"))


def _by_hand(make: Make, blocks: Blocks) -> Step:
    model, loss, _ = make()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in blocks(model.train()):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return training_step(model, loss)


WAYS = [
    _way("BERT", bert, lambda model: model.encoder.layer),
    _way("GPT-2", gpt2, lambda model: model.transformer.h),
    _way("ResNet", resnet, lambda model: model.resnet.encoder.stages),
]
