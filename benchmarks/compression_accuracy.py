"""Measure what compression costs in accuracy, on scikit-learn's digits: 1797 images of 8 x 8, a quarter for testing.

    python benchmarks/compression_accuracy.py [--only WAY ...] [--networks cnn mlp vit] [--seeds 3] [--json FILE]

A CNN, an MLP and a vision transformer are trained to 94 to 99%, compressed in each way, and trained on for a few epochs
where the way says so. A way is a function in WAYS: it is given a trained network and the data, and returns the
compressed one.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import fxopt
from fxopt.transforms.prune import GroupSparsity, Prune, PruningSchedule, shares_in_steps
from fxopt.transforms.qat import Qat
from fxopt.transforms.quantize import Quantize

BATCH, TRAINING, TUNING = 64, 60, 3
"""Rows of a step; epochs of training, and of fine-tuning."""


@dataclass(frozen=True)
class Digits:
    """Images and labels, to train and to test with, and the seed that divided them."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    seed: int

    def accuracy(self, model: nn.Module) -> float:
        """Return the share of the test images that a model gets right, in percent."""
        model.eval()
        with torch.no_grad():
            right = model(self.test_images).argmax(1) == self.test_labels
        return 100 * float(right.float().mean())

    def trained(
        self, model: nn.Module, epochs: int, after_step: Callable[[], None] | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> nn.Module:  # fmt: skip
        """Return the model, trained for so many epochs, at a rate that falls to zero along a cosine."""
        optimizer = torch.optim.Adam(model.train().parameters(), 1e-3)
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, self.steps(epochs)))
        for _ in range(epochs):
            for rows in torch.randperm(len(self.images)).split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(self.images[rows]), self.labels[rows]).backward()
                if before_step is not None:
                    before_step()
                optimizer.step()
                falling.step()
                if after_step is not None:
                    after_step()
        return model

    def steps(self, epochs: int) -> int:
        """Return how many steps so many epochs are."""
        return epochs * -(-len(self.images) // BATCH)


def digits(seed: int) -> Digits:
    """Return the data, in random halves that a seed draws."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.25, random_state=seed, stratify=labels)
    images, test_images = (torch.tensor(part, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16 for part in parts[:2])
    labels, test_labels = (torch.tensor(part) for part in parts[2:])
    return Digits(images, labels, test_images, test_labels, seed)


def cnn() -> nn.Module:
    """Return two convolutions with batch norms, and two linears."""
    convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    convolutions += [nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10))


def mlp() -> nn.Module:
    """Return three linears."""
    layers = [nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers)


class Vit(nn.Module):
    """Patches of 2 x 2, two encoder layers of torch, and a linear over their mean."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(1, 16, width) / 50)
        layer = nn.TransformerEncoderLayer(width, 4, 128, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.encoder(tokens).mean(1))


NETWORKS: Mapping[str, Callable[[], nn.Module]] = {"cnn": cnn, "mlp": mlp, "vit": Vit}


def pruned(passes: str, epochs: int = TUNING) -> Callable[[nn.Module, Digits], nn.Module]:
    """Return the way that prunes, and trains on."""

    def way(model: nn.Module, data: Digits) -> nn.Module:
        return data.trained(fxopt.optimize(model, passes, example_inputs=data.images[:8]), epochs)

    return way


def units(criterion: str, epochs: int = TUNING) -> Callable[[nn.Module, Digits], nn.Module]:
    """Return the way that removes half of the units; gradients are of results on the training data, or of the loss."""

    def way(model: nn.Module, data: Digits) -> nn.Module:
        given: dict[str, Any] = {}
        name, _, of = criterion.partition(" of ")
        if name in ("taylor", "hessian"):
            batches = list(zip(data.images.split(BATCH), data.labels.split(BATCH), strict=True))
            given = {"data": batches, "loss": loss if of else results}
        prune = Prune(method="structured", scope="layer", criterion=cast("Any", name), seed=data.seed, **given)
        return data.trained(fxopt.optimize(model, prune, example_inputs=data.images[:8]), epochs)

    return way


def peer(criterion: str, epochs: int = TUNING) -> Callable[[nn.Module, Digits], nn.Module]:
    """Return the way that removes half of the units with torch-pruning, whose gradients are of the loss."""

    def way(model: nn.Module, data: Digits) -> nn.Module:
        tp: Any = importlib.import_module("torch_pruning")  # it is no part of the environment
        importance = tp.importance.GroupMagnitudeImportance(p=2)
        if criterion == "taylor":
            importance = tp.importance.GroupTaylorImportance()
            loss(model.eval(), (data.images, data.labels)).backward()
        last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        tp.pruner.MetaPruner(model, data.images[:8], importance, pruning_ratio=0.5, ignored_layers=[last]).step()
        model.zero_grad()
        return data.trained(model, epochs)

    return way


def made_sparse(epochs: int, tuning: int) -> Callable[[nn.Module, Digits], nn.Module]:
    """Return the way that shrinks half of the units in some epochs, removes them, and trains on."""

    def way(model: nn.Module, data: Digits) -> nn.Module:
        prune = Prune(method="structured", scope="layer")
        sparse = GroupSparsity(model, prune, fxopt.capture(model, data.images[:8]), data.steps(epochs), SPARSE)
        data.trained(model, epochs, before_step=sparse.step)
        return data.trained(fxopt.optimize(model, prune, example_inputs=data.images[:8]), tuning)

    return way


SPARSE = 1.0
"""The strength of the penalty in the end."""


def in_steps(epochs: int, steps: int) -> Callable[[nn.Module, Digits], nn.Module]:
    """Return the way that removes half of the units in several steps, and trains on after each."""

    def way(model: nn.Module, data: Digits) -> nn.Module:
        for share in shares_in_steps(0.5, steps):
            prune = Prune(method="structured", scope="layer", amount=share)
            model = data.trained(fxopt.optimize(model, prune, example_inputs=data.images[:8]), epochs // steps)
        return model

    return way


def results(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(batch[0])


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def gradually(passes: str, epochs: int) -> Callable[[nn.Module, Digits], nn.Module]:
    """Return the way that prunes step by step in the first two thirds of the epochs."""

    def way(model: nn.Module, data: Digits) -> nn.Module:
        fast = fxopt.optimize(model, passes, example_inputs=data.images[:8])
        schedule = PruningSchedule(fast, steps=data.steps(epochs) * 2 // 3, every=5)
        return data.trained(fast, epochs, after_step=schedule.step)

    return way


def quantized(scheme: str) -> Callable[[nn.Module, Digits], nn.Module]:
    """Return the way that computes in few bits; all training images are there to calibrate with."""

    def way(model: nn.Module, data: Digits) -> nn.Module:
        calibration = list(data.images.split(BATCH)) if scheme == "int8_static" else None
        quantize = Quantize(scheme=scheme, aim="size", calibration=calibration)
        return fxopt.optimize(model.eval(), quantize, example_inputs=data.images[:BATCH])

    return way


def trained_quantized(observer: str) -> Callable[[nn.Module, Digits], nn.Module]:
    """Return the way that trains on as if in 8 bits, ranges frozen in the last epoch, and then computes in 8 bits."""

    def way(model: nn.Module, data: Digits) -> nn.Module:
        qat = Qat(observer=observer, freeze_after=data.steps(TUNING - 1))
        fast = fxopt.optimize(model.train(), qat, example_inputs=data.images[:BATCH], phase="train")
        return quantized("int8_static")(data.trained(fast, TUNING), data)

    return way


@dataclass(frozen=True)
class Way:
    """One way of compressing.

    Attributes:
        apply: what it does.
        target: how many points it may cost; None where none was promised.
        networks: those that it can do.
    """

    apply: Callable[[nn.Module, Digits], nn.Module]
    target: float | None = None
    networks: tuple[str, ...] = tuple(NETWORKS)


CRITERIA = ("random", "taylor", "hessian", "taylor of the loss", "hessian of the loss", "fpgm")
"""What units are judged by, beside magnitudes."""

CHAINS = ("cnn", "mlp")
"""Networks without attention: torch-pruning is told of heads by hand."""

WAYS: Mapping[str, Way] = {
    "train on, uncompressed": Way(lambda model, data: data.trained(model, TUNING)),
    "2:4, not trained on": Way(pruned("prune{method=nm}", 0)),
    "2:4": Way(pruned("prune{method=nm}"), 0.5),
    "2:4, best order": Way(pruned("prune{method=nm,permute=true}"), 0.5),
    "2:4, best order, not trained on": Way(pruned("prune{method=nm,permute=true}", 0)),
    "50% of units": Way(units("magnitude"), 1.0),
    **{f"50% of units, {name}": Way(units(name)) for name in CRITERIA},
    **{f"50% of units, {name}, not trained on": Way(units(name, 0)) for name in ("magnitude", *CRITERIA)},
    **{f"50% of units, {name} of torch-pruning": Way(peer(name), None, CHAINS) for name in ("magnitude", "taylor")},
    **{
        f"50% of units, {name} of torch-pruning, not trained on": Way(peer(name, 0), None, CHAINS)
        for name in ("magnitude", "taylor")
    },
    "50% of units, four times as long": Way(units("magnitude", 4 * TUNING)),
    "50% of units, in four steps": Way(in_steps(4 * TUNING, 4)),
    "50% of units, made sparse before": Way(made_sparse(3 * TUNING, TUNING)),
    "50% of units, made sparse before, not trained on": Way(made_sparse(3 * TUNING, 0)),
    "80% of weights": Way(pruned("prune{amount=0.8}")),
    "95% of weights": Way(pruned("prune{amount=0.95}")),
    "95% of weights, cubic": Way(gradually("prune{amount=0.95,schedule=cubic}", 3 * TUNING)),
    "int8 dynamic": Way(quantized("int8_dynamic")),
    "int8 weights": Way(quantized("int8_weight")),
    "int4 weights": Way(quantized("int4_weight")),
    "int8 static": Way(quantized("int8_static"), 0.5),
    "QAT, moving average": Way(trained_quantized("moving_average"), 0.3),
    "QAT, learned ranges": Way(trained_quantized("learned"), 0.3),
}


def measure(name: str, way: Way, networks: list[str], seeds: int) -> list[dict[str, Any]]:
    """Return what a way costs on each network: percent before and after, and points lost, means over seeds."""
    rows: list[dict[str, Any]] = []
    for network in (each for each in networks if each in way.networks):
        pairs = [_accuracies(way, network, seed) for seed in range(seeds)]
        before, after = (statistics.mean(values) for values in zip(*pairs, strict=True))
        lost = [before - after for before, after in pairs]
        row = {"way": name, "network": network, "before": before, "after": after, "lost": before - after}
        rows.append({**row, "lost_by_seed": lost, "target": way.target})
        met = "" if way.target is None else "met" if before - after <= way.target else "MISSED"
        print(f"{network:5}{name:50}{before:8.2f}{after:8.2f}{before - after:8.2f}  {met}", flush=True)
    return rows


def _accuracies(way: Way, network: str, seed: int) -> tuple[float, float]:
    data, model = _trained(network, seed)
    torch.manual_seed(seed)
    return data.accuracy(model), data.accuracy(way.apply(copy.deepcopy(model).train(), data))


@functools.cache
def _trained(network: str, seed: int) -> tuple[Digits, nn.Module]:
    torch.manual_seed(seed)
    data = digits(seed)
    return data, data.trained(NETWORKS[network](), TRAINING)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(WAYS), help="by default all ways")
    parser.add_argument("--networks", nargs="*", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"{'':5}{'':50}{'before':>8}{'after':>8}{'lost':>8}  (percent right, points)")
    rows = [
        row for name in arguments.only or WAYS for row in measure(name, WAYS[name], arguments.networks, arguments.seeds)
    ]
    if arguments.json:
        report = {"schema_version": 1, "torch": str(torch.__version__), "seeds": arguments.seeds, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
