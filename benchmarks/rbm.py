"""Measure RBMs and deep belief networks on scikit-learn's digits, beside `sklearn.neural_network.BernoulliRBM`.

    python benchmarks/rbm.py [--only features speed fine_tuning] [--json FILE] [--pictures docs/layers]

features: the images nudged by a pixel (8,985 of 8 x 8), 100 hidden units, persistent contrastive divergence, 10 epochs,
logistic regression on top, as in scikit-learn's example; percent right of a fifth that is held back. speed: both in
turn, on one thread, in processor time. fine_tuning: a network from a deep belief network beside one from random
weights. pictures: filters of the RBM and samples of a network, as PNG files.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import described
from scipy.ndimage import shift
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.neural_network import BernoulliRBM
from sklearn.preprocessing import minmax_scale
from torch import Tensor, nn

from fxopt.layers import RBM, DeepBeliefNetwork

HIDDEN, EPOCHS, BATCH, RATE = 100, 10, 10, 0.06
"""Of the RBM, as in scikit-learn's example."""
SIZES, LABELS = (64, 400, 200), (100, 1437)
"""Units of the network that is fine-tuned; images with a label."""


@dataclass(frozen=True)
class Digits:
    """Images [rows, 64] in [0, 1] and labels, to train and to test with."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def digits(seed: int) -> Digits:
    """Return all 1,797 images, a fifth of them to test with."""
    images, labels = load_digits(return_X_y=True)
    return _split(images / 16, labels, seed, stratify=labels)


def nudged(seed: int) -> Digits:
    """Return each image five times: as it is, and moved by a pixel to each side."""
    images, labels = load_digits(return_X_y=True)
    moves = [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)]
    moved = [[shift(image.reshape(8, 8), move, order=0).ravel() for image in images] for move in moves]
    return _split(minmax_scale(np.concatenate(moved)), np.concatenate([labels] * len(moves)), seed)


def _split(images: np.ndarray, labels: np.ndarray, seed: int, stratify: np.ndarray | None = None) -> Digits:
    parts = train_test_split(images.astype("float32"), labels, test_size=0.2, random_state=seed, stratify=stratify)
    return Digits(parts[0], parts[2], parts[1], parts[3])


def by_sklearn(images: np.ndarray, seed: int) -> Callable[[np.ndarray], np.ndarray]:
    """Train scikit-learn's RBM, and return what gives the probabilities of its hidden units."""
    rbm = BernoulliRBM(n_components=HIDDEN, learning_rate=RATE, batch_size=BATCH, n_iter=EPOCHS, random_state=seed)
    return rbm.fit(images).transform


def by_fxopt(images: np.ndarray, seed: int, persistent: bool = True) -> Callable[[np.ndarray], np.ndarray]:
    """Train fxopt's, and return the same."""
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"batch_size": BATCH, "learning_rate": RATE, "persistent": persistent}
    rbm = RBM(64, HIDDEN).fit(torch.from_numpy(images), EPOCHS, generator=generator, **options)
    return lambda rows: rbm(torch.from_numpy(rows)).detach().numpy()


WAYS: Mapping[str, Callable[[np.ndarray, int], Callable[[np.ndarray], np.ndarray]]] = {
    "sklearn": by_sklearn,
    "fxopt": by_fxopt,
    "fxopt, CD-1": lambda images, seed: by_fxopt(images, seed, persistent=False),
}


def features(seeds: int) -> dict[str, Any]:
    """Return percent right of logistic regression on the hidden units, by seed."""
    right: dict[str, list[float]] = {name: [] for name in WAYS}
    for seed in range(seeds):
        data = nudged(seed)
        for name, train in WAYS.items():
            torch.manual_seed(seed)
            of = train(data.images, seed)
            top = LogisticRegression(solver="newton-cg", C=6000, tol=1e-3).fit(of(data.images), data.labels)
            right[name].append(100 * top.score(of(data.test_images), data.test_labels))
            print(f"features, split {seed}  {name:12} {right[name][-1]:6.2f} %", flush=True)
    means = {name: statistics.mean(values) for name, values in right.items()}
    print("features, mean      ", {name: round(mean, 2) for name, mean in means.items()})
    return {"mean": means, "by split": right}


def speed(rounds: int) -> dict[str, Any]:
    """Return how many times as fast as scikit-learn's each is, in pairs, in processor time."""
    data, load = nudged(0), os.getloadavg()[0]
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(rounds):
        for name, train in WAYS.items():
            start = time.process_time()
            train(data.images, number)
            seconds[name].append(time.process_time() - start)
    result: dict[str, Any] = {"rounds": rounds, "load_average": [round(load, 1), round(os.getloadavg()[0], 1)]}
    for name, taken in seconds.items():
        ratios = sorted(theirs / own for theirs, own in zip(seconds["sklearn"], taken, strict=True))
        cut = max(0, math.floor(rounds * 0.025))
        low, high = ratios[cut], ratios[-1 - cut]
        result[name] = {"seconds": statistics.median(taken), "ratio": statistics.median(ratios), "95%": [low, high]}
        times = f"{statistics.median(ratios):5.2f}x [{low:.2f}, {high:.2f}]"
        print(f"speed  {name:12} {statistics.median(taken):6.3f} s  {times}", flush=True)
    return result


def plain(seed: int) -> nn.Sequential:
    """Return the network that is fine-tuned, with weights as `nn.Linear` draws them."""
    torch.manual_seed(seed)
    return DeepBeliefNetwork(SIZES).to_feedforward(10).apply(_drawn_anew)


def xavier(seed: int) -> nn.Sequential:
    """Return it with Xavier's weights (Glorot and Bengio, 2010), which are made for sigmoids."""
    network = plain(seed)
    for layer in network:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return network


def _drawn_anew(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear):
        layer.reset_parameters()


def fine_tuning(seeds: int) -> list[dict[str, Any]]:
    """Return percent right after fine-tuning, by how many labels there are and where the weights came from."""
    right: dict[tuple[int, str], list[float]] = {}
    for seed in range(seeds):
        data = digits(seed)
        torch.manual_seed(seed)
        believing = believed(data, seed)
        for labels in LABELS:
            starts = {
                "random": plain(seed),
                "random, Xavier": xavier(seed),
                "deep belief": believing.to_feedforward(10),
            }
            for name, network in starts.items():
                right.setdefault((labels, name), []).append(tuned(network, data, labels, seed))
    rows = [
        {"labels": labels, "start": name, "mean": statistics.mean(values), "by_seed": values}
        for (labels, name), values in right.items()
    ]
    for row in rows:
        spread = statistics.stdev(row["by_seed"]) if seeds > 1 else 0.0
        print(f"fine-tuning, {row['labels']:5} labels  {row['start']:15} {row['mean']:6.2f} % +- {spread:.2f}")
    return rows


def believed(data: Digits, seed: int) -> DeepBeliefNetwork:
    """Return a network that was trained on the images, without labels."""
    generator, images = torch.Generator().manual_seed(seed), torch.from_numpy(data.images)
    network = DeepBeliefNetwork(SIZES)
    return network.fit(images, 100, 0.05, batch_size=BATCH, weight_decay=1e-4, momentum=0.5, generator=generator)


def tuned(network: nn.Sequential, data: Digits, count: int, seed: int) -> float:
    """Train on the first images with Adam, in steps as many for any count, and return percent right."""
    images, labels = torch.from_numpy(data.images[:count]), torch.from_numpy(data.labels[:count])
    generator, steps, size = torch.Generator().manual_seed(seed), 1500, 50
    optimizer = torch.optim.Adam(network.parameters(), 2e-3)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(count, (size,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images[rows]), labels[rows]).backward()
        optimizer.step()
        falling.step()
    with torch.no_grad():
        guessed = network(torch.from_numpy(data.test_images)).argmax(1)
    return 100 * float((guessed == torch.from_numpy(data.test_labels)).float().mean())


def pictures(folder: Path) -> None:
    """Write the filters of the RBM, and draws of a deep belief network with some images of the data."""
    torch.manual_seed(0)
    generator, images = torch.Generator().manual_seed(0), torch.from_numpy(nudged(0).images)
    rbm = RBM(64, HIDDEN).fit(
        images, EPOCHS, batch_size=BATCH, learning_rate=RATE, persistent=True, generator=generator
    )
    filters = rbm.weight.detach()
    write_png(folder / "rbm_filters.png", tiled(0.5 + 0.5 * filters / filters.abs().amax(1, keepdim=True)))
    images = torch.from_numpy(digits(0).images)
    network = DeepBeliefNetwork((64, 300, 300))
    options: dict[str, Any] = {"batch_size": 20, "persistent": True, "weight_decay": 2e-4, "generator": generator}
    network.fit(images, [80, 150], 0.05, momentum=0.8, **options)
    network.machines[1].fit(network.machines[0](images), 60, learning_rate=0.005, momentum=0.8, **options)
    drawn = network.sample(50, 1000, means=True, generator=generator)
    write_png(folder / "deep_belief_samples.png", tiled(torch.cat([images[:50], drawn])))


def tiled(images: Tensor, across: int = 10, zoom: int = 4) -> np.ndarray:
    """Return images [rows, 64] in a grid, each pixel enlarged, with white lines between."""
    framed = nn.functional.pad(images.reshape(-1, across, 8, 8), (0, 1, 0, 1), value=1.0)
    grid = framed.permute(0, 2, 1, 3).reshape(-1, across * 9)
    return (grid.clamp(0, 1) * 255).byte().repeat_interleave(zoom, 0).repeat_interleave(zoom, 1).numpy()


def write_png(path: Path, gray: np.ndarray) -> None:
    """Write an image of bytes [height, width] (PNG specification, third edition: 8 bits, greyscale, no filter)."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width = gray.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), gray], axis=1).tobytes()
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows, 9)), chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def main() -> None:
    parts: dict[str, Callable[[argparse.Namespace], Any]] = {
        "features": lambda arguments: features(arguments.seeds),
        "speed": lambda arguments: speed(arguments.rounds),
        "fine_tuning": lambda arguments: fine_tuning(2 * arguments.seeds),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(parts), default=list(parts), help="by default all")
    parser.add_argument("--seeds", type=int, default=5, help="splits; twice as many for fine_tuning")
    parser.add_argument("--rounds", type=int, default=15, help="pairs that are timed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"schema_version": 1, "machine": {**described(), "load_average": [os.getloadavg()[0]]}}
    for name in arguments.only:
        report[name] = parts[name](arguments)
    report["machine"]["load_average"].append(os.getloadavg()[0])
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arguments.pictures:
        pictures(arguments.pictures)


if __name__ == "__main__":
    main()
