from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxopt.deploy import nn_modules
from fxopt.deploy.nn_modules import build_module, class_name, settings_of
from fxopt.errors import ArchiveError

WITH_DIMENSIONS: dict[str, Any] = {
    "AdaptiveAvgPool": lambda cls, d: cls((None, 3, 2)[:d] if d > 1 else 3),
    "AdaptiveMaxPool": lambda cls, d: cls((None, 3, 2)[:d] if d > 1 else 3, True),
    "AvgPool": lambda cls, d: cls(3, 2, 1, True, False),
    "BatchNorm": lambda cls, d: cls(4, 1e-3, None, False, False),
    "Conv": lambda cls, d: cls(4, 6, 3, 2, 1, 1, 2, False, "reflect" if d < 3 else "zeros"),
    "ConstantPad": lambda cls, d: cls(2, 1.5),
    "ConvTranspose": lambda cls, d: cls(4, 6, 3, 2, 1, 1, 2, False),
    "Dropout": lambda cls, d: cls(0.3),
    "InstanceNorm": lambda cls, d: cls(4, 1e-3, 0.2, True, True),
    "LPPool": lambda cls, d: cls(2, 3, 2, True),
    "MaxPool": lambda cls, d: cls(3, 2, 1, 1, True, True),
    "MaxUnpool": lambda cls, d: cls(3, 2, 1),
}
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "AlphaDropout": (0.2,), "Bilinear": (3, 4, 5, False), "CELU": (2.0,), "ChannelShuffle": (2,),
    "CosineSimilarity": (2, 1e-3), "ELU": (2.0,), "Embedding": (5, 4, 1, 2.0, 1.0, True, False),
    "EmbeddingBag": (5, 4, 2.0, 1.0, False, "sum", False), "Flatten": (0, 2), "Fold": ((4, 5), (2, 2)),
    "GELU": ("tanh",), "GLU": (1,), "GRU": (3, 4, 2, False, True, 0.1, True), "GRUCell": (3, 4, False),
    "GroupNorm": (2, 4, 1e-3, False), "Hardshrink": (0.2,), "Hardtanh": (-2, 2, True),
    "LSTM": (3, 4, 2, True, True, 0.1, True, 2), "LSTMCell": (3, 4), "LayerNorm": ((4, 3), 1e-3, True, False),
    "LeakyReLU": (0.2, True), "Linear": (3, 4, False), "LocalResponseNorm": (2, 1e-3, 0.5, 2.0), "LogSoftmax": (1,),
    "MultiheadAttention": (4, 2, 0.1, False, True, True, 6, 8, True), "PReLU": (4, 0.1), "PixelShuffle": (2,),
    "PixelUnshuffle": (2,), "RMSNorm": ((4,), None, True), "RNN": (3, 4, 2, "relu"), "RNNCell": (3, 4, True, "relu"),
    "RReLU": (0.1, 0.2), "Softmax": (1,), "Softmin": (1,), "Softplus": (2.0, 10.0), "Softshrink": (0.2,),
    "Threshold": (0.1, 2.0), "Unflatten": (1, (2, 3)), "Unfold": ((2, 2), 2), "Upsample": (None, 2.0, "bilinear", True),
    "UpsamplingBilinear2d": (None, 2), "UpsamplingNearest2d": ((3, 4),),
}  # fmt: skip

NAMES = sorted(name.rpartition(".")[2] for name in nn_modules._classes())


def made(name: str) -> nn.Module:
    cls, dimensions = getattr(nn, name), int(name[-2]) if name[-1] == "d" and name[-2].isdigit() else 0
    if name in ARGUMENTS:
        return cls(*ARGUMENTS[name])
    if dimensions and name[:-2] in WITH_DIMENSIONS:
        return WITH_DIMENSIONS[name[:-2]](cls, dimensions)
    return cls(2) if "Pad" in name else cls()


@pytest.mark.parametrize("name", NAMES)
def test_settings_build_an_equal_module(name: str):
    module = made(name)
    state = torch.get_rng_state()
    settings = settings_of(module)
    assert settings is not None
    rebuilt = build_module(class_name(module), settings)
    assert repr(rebuilt) == repr(module)
    assert {key: value.shape for key, value in rebuilt.state_dict().items()} == {
        key: value.shape for key, value in module.state_dict().items()
    }
    assert all(tensor.is_meta for tensor in rebuilt.state_dict().values())
    assert torch.equal(torch.get_rng_state(), state)


def test_what_was_changed_after_it_was_built_has_no_settings():
    pruned = nn.Linear(3, 4)
    pruned.weight = nn.Parameter(torch.randn(2, 3))
    assert settings_of(pruned) is None
    mixed = nn.Conv2d(2, 2, 3, padding=1)
    mixed._reversed_padding_repeated_twice = [2, 2, 2, 2]
    assert settings_of(mixed) is None
    grown = nn.MultiheadAttention(4, 2)
    grown.out_proj = nn.Sequential(grown.out_proj)
    assert settings_of(grown) is None
    tuned = nn.BatchNorm1d(3)
    tuned.momentum = 0.5
    assert settings_of(tuned) is not None


def test_only_exactly_these_classes_are_held():
    class Mine(nn.Linear):
        pass

    assert class_name(Mine(2, 2)) is None
    assert class_name(nn.Sequential()) is None
    assert class_name(nn.TransformerEncoderLayer(4, 2)) is None


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("torch.nn.Sequential", {}),
        ("torch.nn.modules.Linear", {"in_features": 2, "out_features": 2}),
        ("os.system", {}),
        (None, {}),
        ("torch.nn.Linear", {}),
        ("torch.nn.Linear", {"in_features": -1, "out_features": 2}),
        ("torch.nn.Linear", {"in_features": "2", "out_features": 2}),
        ("torch.nn.Linear", {"in_features": 10**30, "out_features": 2}),
        ("torch.nn.Linear", {"in_features": 2, "out_features": 2, "device": "cuda"}),
        ("torch.nn.Linear", {"in_features": {}, "out_features": 2}),
        ("torch.nn.Embedding", {"num_embeddings": 2, "embedding_dim": 2, "_weight": 3}),
        ("torch.nn.LSTM", {"input_size": 1, "hidden_size": 1, "num_layers": 10**9}),
        ("torch.nn.LSTM", {"input_size": 1, "hidden_size": 1, "num_layers": "3"}),
        ("torch.nn.Dropout", {"p": 2}),
    ],
)
def test_settings_that_build_nothing(name: Any, settings: dict[str, Any]):
    with pytest.raises(ArchiveError):
        build_module(name, settings)


def test_huge_modules_take_no_memory():
    assert build_module("torch.nn.Linear", {"in_features": 10**6, "out_features": 10**6}).weight.is_meta
