"""The rows of the table: a network, its call, and what each column is to reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from . import networks

__all__ = ["CASES", "SEED", "Case"]

SEED = 7
_BUDGETS: Mapping[str, float] = {"exact": 1e-4, "bf16": 2e-2, "int8": 5e-2}
_TRAINING_BUDGETS: Mapping[str, float] = {"exact": 1e-4, "bf16": 5e-2}
"""Column -> error of results, and of gradients; those of the passes for what is not exact."""

Example = tuple[nn.Module, tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        build: returns the network and the arguments of its call.
        aims: column -> the ratio over eager that it is to reach.
        preparation: the seconds that optimizing it exactly may take, with verification and timing.
        int8: the passes that compute with 8 bits.
        labels: of how many classes a training step learns labels; 0 for evaluation.
        optimizer: of a training step: name in `torch.optim`, and options.
    """

    build: Callable[[], Example]
    aims: Mapping[str, float] = field(default_factory=dict[str, float])
    preparation: float = 0.0
    int8: str = "quantize"
    labels: int = 0
    optimizer: tuple[str, Mapping[str, Any]] = ("AdamW", {"lr": 1e-5})

    def budget(self, column: str) -> float | None:
        """Return the largest error that a column of fxopt may make, over the largest value of the reference."""
        return _TRAINING_BUDGETS.get(column) if self.labels else _BUDGETS.get(column)

    def built(self) -> Example:
        """Return the network, in the mode in which it is measured, and its arguments; the same ones each time."""
        torch.manual_seed(SEED)
        model, arguments = self.build()
        return model.train(bool(self.labels)), arguments


def _image(network: Callable[[], nn.Module], rows: int = 1, size: int = 224) -> Example:
    model, image = network(), torch.randn(rows, 3, size, size)
    return networks.settled(model, image), (image,)


def _text(network: Callable[[], nn.Module], count: int, vocabulary: int, rows: int = 1) -> Example:
    return network(), (networks.tokens(count, vocabulary, rows),)


def _decoding(network: Callable[[], Any], length: int = 128) -> Example:
    decoder = network()
    token, past = networks.tokens(1, decoder.config.vocab_size), networks.past(decoder.config, length)
    return networks.Step(decoder), (token, past)


def _tagger() -> Example:
    return networks.Tagger(), (networks.tokens(64, 20_000, 8),)


def _graph(kind: str, nodes: int = 10_000, degree: int = 10) -> Example:
    return networks.Graph(kind), (torch.randn(nodes, 64), torch.randint(0, nodes, (2, nodes * degree)))


def _perceptron(rows: int) -> Example:
    return networks.Perceptron(), (torch.randn(rows, 784),)


def _aims(exact: float | None, bf16: float | None = None, int8: float | None = None) -> dict[str, float]:
    given = {"exact": exact, "bf16": bf16, "int8": int8}
    return {column: aim for column, aim in given.items() if aim is not None}


def _net(
    network: Callable[[], nn.Module], exact: float | None = None, bf16: float | None = None, size: int = 224
) -> Case:
    build = partial(_image, network, size=size)
    return Case(build, _aims(exact, bf16), preparation=2.0, int8="quantize{scheme=int8_static}")


def _decoder(network: Callable[[], Any], exact: float, bf16: float, int8: float) -> Case:
    aims = _aims(exact, bf16, int8)
    return Case(partial(_decoding, network), aims, preparation=6.0)


_SGD = ("SGD", {"lr": 1e-4, "momentum": 0.9})
_BERT = partial(networks.bert_base, labels=2)
CASES: Mapping[str, Case] = {
    "resnet-18": _net(networks.resnet_18, 1.65, 3.2),
    "resnet-50": _net(networks.resnet_50, 1.6, 3.0),
    "mobilenet-v2": _net(networks.mobilenet_v2, 2.9, 4.7),
    "mobilenet-v3-large": _net(networks.MobileNetV3),
    "efficientnet-b0": _net(networks.efficientnet_b0),
    "shufflenet-v2": _net(networks.ShuffleNetV2),
    "convnext-tiny": _net(networks.convnext_tiny, 1.3, 2.4),
    "u-net": _net(networks.UNet, 1.4, 2.9, size=256),
    "bert-base, 64 tokens": Case(partial(_text, networks.bert_base, 64, 30522), _aims(1.4, 2.6, 3.7), 6.0),
    "gpt2, 128 tokens": Case(partial(_text, networks.gpt2, 128, 50257), _aims(1.5, 2.7, 3.6), 6.0),
    "llama, 128 tokens": Case(partial(_text, networks.llama, 128, 32000), _aims(1.3, 2.4, 3.2), 6.0),
    "vit-small": Case(partial(_image, networks.vit_small), _aims(1.28, 2.3, 2.6), 6.0),
    "swin-tiny": Case(partial(_image, networks.swin_tiny), preparation=6.0),
    "detr": _net(networks.detr, size=480),
    "gpt2, a step": _decoder(networks.gpt2, 1.3, 1.8, 3.3),
    "llama, a step": _decoder(networks.llama, 1.2, 1.8, 3.0),
    "lstm": Case(_tagger, _aims(1.5, 2.2, 2.8)),
    "gcn": Case(partial(_graph, "GCNConv"), _aims(10)),
    "gat": Case(partial(_graph, "GATConv"), _aims(6)),
    "mlp, batch 1": Case(partial(_perceptron, 1), _aims(2.2)),
    "mlp, batch 128": Case(partial(_perceptron, 128), _aims(1.25, 2.3, 3.4)),
    "training resnet-18": Case(partial(_image, networks.resnet_18, 8), _aims(1.12, 2.1), labels=1000, optimizer=_SGD),
    "training bert-base": Case(partial(_text, _BERT, 64, 30522, 4), _aims(1.3, 1.8), labels=2),
    "training mlp": Case(partial(_perceptron, 128), _aims(1.3, 2.1), labels=10),
}
