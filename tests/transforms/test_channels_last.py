"""channels_last: images lie so between convolutions; results, checkpoints and training stay what they were."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn, optim

import fxopt
from fxopt.operators import laid_last
from fxopt.passes.pipeline import parse
from fxopt.testing import assert_equivalent
from fxopt.transforms.channels_last import ChannelsLast

IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
Step = Callable[[nn.Module, optim.Optimizer, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


class Network(nn.Module):
    """A small residual network; `views` says whether it reads images in the order of their dimensions."""

    def __init__(self, views: bool = False) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, 8, 3), nn.Sequential(Block(8), Block(8)), nn.Linear(8, 4)
        self.pool, self.views = nn.AdaptiveAvgPool2d(1), views

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(torch.relu(self.stem(x)))
        if self.views:
            return self.head(x.view(x.shape[0], 8, -1).mean(2))
        return self.head(torch.flatten(self.pool(x), 1))


def network(views: bool = False) -> Network:
    torch.manual_seed(0)
    return Network(views)


def laid(model: nn.Module, x: Tensor = IMAGES, **options: object) -> nn.Module:
    return fxopt.optimize(model, "channels_last", example_inputs=x, measure=False, **options)  # type: ignore[arg-type]


def nodes(model: nn.Module, owner: str = "") -> list[str]:
    return [node.name for node in fxopt.graphs(model)[owner].nodes]


def lies_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def weights(model: nn.Module) -> set[bool]:
    """Say of the weights of convolutions how they lie: whether channels last."""
    return {lies_last(parameter) for parameter in model.parameters() if parameter.dim() == 4}


def statuses(model: nn.Module) -> list[tuple[str, str]]:
    return [(decision.status, decision.reason) for decision in fxopt.plan(model).decisions]


def test_it_fires() -> None:
    model = network()
    fast = laid(model)
    assert nodes(fast) == ["x", "laid_last", "stem", "relu", "blocks", "pool", "flatten", "head", "output"]
    inside = ["x", "laid_last", "first", "norm", "relu", "laid_last_1", "second", "add", "relu_1", "output"]
    assert nodes(fast, "blocks.0") == nodes(fast, "blocks.1") == inside
    assert weights(fast) == {False}
    again = copy.deepcopy(fast)
    assert lies_last(again.blocks(again.stem(laid_last(IMAGES))))
    assert str(ChannelsLast()) == "channels_last"
    assert_equivalent(model, fast, IMAGES)


def test_what_reads_images_in_order_gets_them_so() -> None:
    """The original forward must run as well, for a call that no graph fits: `.view` refuses images channels last."""
    model = network(views=True)
    fast = laid(model)
    assert "contiguous" in nodes(fast)
    assert_equivalent(model, fast, IMAGES)
    type(model).forward(fast, IMAGES)


def test_images_that_the_model_returns_lie_as_they_did() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    assert laid(model)(IMAGES).is_contiguous()


def with_hook() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    model[0].register_forward_hook(lambda *_: None)
    return model


class Doubling(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(2 * input)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.relu(self.one(x)))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hooks": (with_hook, "it has hooks"),
    "subclass": (lambda: nn.Sequential(Doubling(3, 4, 3), nn.ReLU()), "it is a Doubling, which may"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_refuses(case: str) -> None:
    make, reason = REFUSED[case]
    fast = laid(make())
    assert all(status == "refused" and found.startswith(reason) for status, found in statuses(fast)), statuses(fast)
    assert statuses(fast)


def test_it_has_nothing_to_do_without_convolutions() -> None:
    assert statuses(laid(nn.Sequential(nn.Linear(12, 4), nn.ReLU()))) == []


def test_tied_weights_train_as_they_did(step: Step) -> None:
    torch.manual_seed(0)
    model = Tied()
    fast = laid(model)
    assert [status for status, _ in statuses(fast)] == ["applied"]
    assert fast.one.weight is fast.other.weight
    one, other = (step(each, optim.SGD(each.parameters(), lr=0.1), IMAGES) for each in (fast, model))
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(fast.one.weight, model.one.weight)


def test_checkpoints_go_both_ways() -> None:
    model, fast = network(), laid(network())
    assert list(fast.state_dict()) == list(model.state_dict())
    file = io.BytesIO()
    torch.save(fast.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    for parameter in model.parameters():
        parameter.data *= 1.5
    fast.load_state_dict(model.state_dict())
    assert_equivalent(model, fast, IMAGES)


def test_copies_conversions_and_other_sizes() -> None:
    model, fast = network(), laid(network())
    again = copy.deepcopy(fast)
    for x in (IMAGES, IMAGES[:1], torch.ones(3, 3, 9, 15), torch.ones(0, 3, 12, 12)):
        torch.testing.assert_close(again(x), model(x))
    torch.testing.assert_close(again.double()(IMAGES.double()), copy.deepcopy(model).double()(IMAGES.double()))


def test_one_image_without_a_batch() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    torch.testing.assert_close(laid(model)(IMAGES[0]), model(IMAGES[0]))


def test_a_second_time_changes_nothing() -> None:
    fast = laid(network())
    again = laid(fast)
    assert nodes(again).count("laid_last") == 1
    assert_equivalent(network(), again, IMAGES)


def test_a_plan_and_an_archive_repeat_it(tmp_path: Path) -> None:
    fast = laid(network())
    repeated = fxopt.optimize(network(), plan=fxopt.plan(fast), example_inputs=IMAGES)
    assert nodes(repeated) == nodes(fast)
    fxopt.save(fast, tmp_path / "model.fxopt", factory=f"{__name__}:network")
    loaded = fxopt.load(tmp_path / "model.fxopt", model=network(), example_inputs=IMAGES)
    assert nodes(loaded) == nodes(fast)
    assert_equivalent(network(), loaded, IMAGES)


def test_in_place_weights_stay_the_objects_that_they_are() -> None:
    model = network()
    before = list(model.parameters())
    laid(model, inplace=True)
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert_equivalent(network(), model, IMAGES)


def test_it_goes_with_pack_and_with_autocast() -> None:
    model = network().eval()
    for passes in ("fold_batchnorm,pack,channels_last", "channels_last,autocast"):
        fast = fxopt.optimize(model, passes, example_inputs=IMAGES, measure=False)
        torch.testing.assert_close(fast(IMAGES), model(IMAGES), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("beside", ["", ",checkpoint{budget=0.8}", ",autocast", ",sync_batchnorm"])
def test_the_preset_training_has_it_and_what_is_listed_beside_goes_with_it(beside: str) -> None:
    model = network().train()
    fast = fxopt.optimize(model, f"training{beside}", example_inputs=IMAGES, measure=False)
    applied = [each.pass_name for each in fxopt.plan(fast).decisions if each.status == "applied"]
    assert "channels_last" in applied
    expected, found = (each(IMAGES) for each in (model, fast))
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    expected.sum().backward()
    found.sum().backward()
    tolerance = 0.5 if "autocast" in beside else 1e-3  # in 16 bits a few ReLUs fall on their other side
    for one, other in zip(fast.parameters(), model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        allowed = tolerance * max(1.0, float(other.grad.abs().max()))
        torch.testing.assert_close(one.grad, other.grad, rtol=0.0, atol=allowed)


def test_a_region_of_autocast_goes_on_where_images_are_laid() -> None:
    fast = fxopt.optimize(network().train(), "channels_last,autocast", example_inputs=IMAGES, measure=False)
    regions = [name for name, graph in fxopt.graphs(fast).items() if "autocast" in name.rpartition(".")[2]]
    assert any("laid_last" in str(node) for name in regions for node in fxopt.graphs(fast)[name].nodes)
    applied = [each.pass_name for each in fxopt.plan(fast).decisions if each.status == "applied"]
    without = fxopt.optimize(network().train(), "autocast", example_inputs=IMAGES, measure=False)
    alone = [each.pass_name for each in fxopt.plan(without).decisions if each.status == "applied"]
    assert applied.count("autocast") == alone.count("autocast")


@dataclass
class Found(dict[str, Tensor]):
    """What an encoder returns, as libraries do."""

    last: Tensor
    pooled: Tensor


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.pool = nn.Conv2d(3, 8, 3), Block(8), nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Found:
        last = self.block(torch.relu(self.stem(x)))
        return Found(last, self.pool(last))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.encoder(x).pooled, 1))


def test_an_object_that_holds_results_reads_no_images_but_what_the_model_returns_lies_in_order() -> None:
    torch.manual_seed(0)
    model = Classifier()
    fast = laid(model)
    assert not any(name.startswith("contiguous") for owner in fxopt.graphs(fast) for name in nodes(fast, owner))
    assert_equivalent(model, fast, IMAGES)
    assert laid(model.encoder)(IMAGES).last.is_contiguous()


def test_text_and_back() -> None:
    assert parse(str(ChannelsLast())) == (ChannelsLast(),)
