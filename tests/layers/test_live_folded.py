"""What code does to a folded convolution or batch norm has the effect that it has on the original, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import fxopt
from fxopt.errors import FusedMemberError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.bn = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x)))


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 50).view(1, 2, 5, 5)


@pytest.fixture
def models() -> tuple[Block, Block]:
    """Return a model and the same with its norm folded, called once."""
    torch.manual_seed(0)
    model = Block().eval()
    nn.init.normal_(model.get_buffer("bn.running_mean"))
    fast = fxopt.optimize(model, "fold_batchnorm", example_inputs=(inputs(),), verify=False, measure=False)
    assert "call_module[target=bn]" not in str(fxopt.graphs(fast)[""])
    fast(inputs())
    return model, fast


EFFECTIVE: dict[str, Callable[[Block], Any]] = {
    "parameter": lambda m: setattr(m.conv, "weight", nn.Parameter(torch.ones(3, 2, 3, 3))),
    "data": lambda m: setattr(m.conv.weight, "data", torch.ones(3, 2, 3, 3)),
    "init": lambda m: nn.init.ones_(m.conv.weight),
    "statistics": lambda m: m.bn.reset_running_stats(),
    "parametrization": lambda m: parametrizations.weight_norm(m.conv),
    "training and back": lambda m: (m.train(), m.eval()),
    "into data, and evaluation": lambda m: (m.conv.weight.data.mul_(2), m.eval()),
    "into data, and a state dict": lambda m: (m.conv.weight.data.mul_(2), m.load_state_dict(m.state_dict())),
    "norm in training": lambda m: m.bn.train(),
}


@pytest.mark.parametrize("change", EFFECTIVE.values(), ids=EFFECTIVE)
def test_changes_have_their_effect(models: tuple[Block, Block], change: Callable[[Block], Any]):
    for each in models:
        change(each)
    torch.testing.assert_close(*(each(inputs()) for each in models))


REFUSED: dict[str, tuple[Callable[[Block], Any], str]] = {
    "no bias": (lambda m: setattr(m.conv, "bias", None), "'bias' cannot become None"),
    "no bias, registered": (lambda m: m.conv.register_parameter("bias", None), "'bias' cannot become None"),
    "no statistics": (lambda m: setattr(m.bn, "running_mean", None), "'running_mean' cannot become None"),
    "no statistics, registered": (
        lambda m: m.bn.register_buffer("running_mean", None),
        "'running_mean' cannot become None",
    ),
    "prune": (lambda m: prune.l1_unstructured(m.conv, "weight", 0.5), "by pruning or a normalization"),
    "hook": (lambda m: m.conv.register_forward_hook(lambda *_: None), "a hook would never run"),
    "setting": (lambda m: setattr(m.bn, "eps", 0.1), "'eps' cannot be replaced"),
    "child": (lambda m: setattr(m, "bn", nn.Identity()), "'bn' cannot be replaced"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_go_unnoticed_is_refused(models: tuple[Block, Block], change: Callable[[Block], Any], message: str):
    model, fast = models
    with pytest.raises(FusedMemberError, match=message):
        change(fast)
    torch.testing.assert_close(fast(inputs()), model(inputs()))


def test_a_deleted_tensor_is_missed_as_in_the_original(models: tuple[Block, Block]):
    for each in models:
        del each.conv.bias
        with pytest.raises(AttributeError, match="'Conv2d' object has no attribute 'bias'"):
            each(inputs())


def test_a_copy_of_a_folded_layer_is_free(models: tuple[Block, Block]):
    _, fast = models
    conv = copy.deepcopy(fast.conv)
    assert type(conv) is nn.Conv2d
    conv.bias = None
    conv.stride = (2, 2)
    assert conv(inputs()).shape == (1, 3, 2, 2)


def test_hooks_on_all_modules_see_those_that_are_called(models: tuple[Block, Block]):
    seen: list[type[nn.Module]] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__mro__[0]))
    try:
        _, fast = models
        fast(inputs())
    finally:
        handle.remove()
    assert [each.__name__ for each in seen] == ["Conv2d", "BatchNorm2d", "Block"]  # as in the original
