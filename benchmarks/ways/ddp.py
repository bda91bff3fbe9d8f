"""Data parallel training: `DistributedDataParallel` by hand, and the pass `ddp`."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from .models import Make, bert, resnet
from .steps import by_pass, training_step
from .way import Step, Way


def _by_hand(make: Make, **settings: Any) -> Step:
    model, loss, _ = make()
    return training_step(DistributedDataParallel(model.train(), **settings), loss)


WAYS = [
    Way("ddp, BERT", lambda: _by_hand(bert, find_unused_parameters=True), lambda: by_pass(bert, "ddp")),
    Way("ddp, ResNet", lambda: _by_hand(resnet), lambda: by_pass(resnet, "ddp")),
]
