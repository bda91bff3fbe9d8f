"""The `torch.nn` modules that a standalone archive may hold, and the arguments that build each of them again."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..compat import modules_by_name, own_buffers, own_parameters
from ..errors import ArchiveError, one_line

__all__ = ["build_module", "class_name", "settings_of"]

_NAMES = """
    AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d
    AlphaDropout AvgPool1d AvgPool2d AvgPool3d BatchNorm1d BatchNorm2d BatchNorm3d Bilinear CELU ChannelShuffle
    CircularPad1d CircularPad2d CircularPad3d ConstantPad1d ConstantPad2d ConstantPad3d Conv1d Conv2d Conv3d
    ConvTranspose1d ConvTranspose2d ConvTranspose3d CosineSimilarity Dropout Dropout1d Dropout2d Dropout3d ELU Embedding
    EmbeddingBag FeatureAlphaDropout Flatten Fold GELU GLU GRU GRUCell GroupNorm Hardshrink Hardsigmoid Hardswish
    Hardtanh Identity InstanceNorm1d InstanceNorm2d InstanceNorm3d LPPool1d LPPool2d LPPool3d LSTM LSTMCell LayerNorm
    LeakyReLU Linear LocalResponseNorm LogSigmoid LogSoftmax MaxPool1d MaxPool2d MaxPool3d MaxUnpool1d MaxUnpool2d
    MaxUnpool3d Mish MultiheadAttention PReLU PixelShuffle PixelUnshuffle RMSNorm RNN RNNCell RReLU ReLU ReLU6
    ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d SELU SiLU Sigmoid
    Softmax Softmax2d Softmin Softplus Softshrink Softsign Tanh Tanhshrink Threshold Unflatten Unfold Upsample
    UpsamplingBilinear2d UpsamplingNearest2d ZeroPad1d ZeroPad2d ZeroPad3d
""".split()

_RECURRENT = "input_size hidden_size num_layers bias batch_first dropout bidirectional".split()
_SETTINGS: Mapping[str, Sequence[str]] = {
    "GRU": _RECURRENT,
    "LSTM": [*_RECURRENT, "proj_size"],
    "RNN": [*_RECURRENT, "nonlinearity"],
    "Identity": [],
    "UpsamplingBilinear2d": ["size", "scale_factor"],
    "UpsamplingNearest2d": ["size", "scale_factor"],
}
"""The arguments of the classes whose signature does not name them."""

_TENSOR_FLAGS = {"add_bias_kv": "bias_k"}
"""Arguments that ask for a tensor which the module holds under another name; `bias` may also be `in_proj_bias`."""

_MOST_LAYERS = 10_000
_PLAIN = (bool, int, float, str, type(None))


@cache
def _classes() -> Mapping[str, type[nn.Module]]:
    return {f"torch.nn.{name}": getattr(nn, name) for name in _NAMES}


def class_name(module: nn.Module) -> str | None:
    """Return the name under which archives hold modules of exactly this class, or None if they hold none."""
    name = f"torch.nn.{type(module).__name__}"
    return name if _classes().get(name) is type(module) else None


def settings_of(module: nn.Module) -> dict[str, Any] | None:
    """Return the arguments that build an equal module, or None where none do (it was changed after it was built)."""
    name = class_name(module)
    if name is None:
        return None
    found = {key: _setting(module, key) for key in _argument_names(name) if _has_setting(module, key)}
    try:
        rebuilt = build_module(name, found)
    except ArchiveError:
        return None
    return found if _is_alike(module, rebuilt) else None


def build_module(name: object, settings: Mapping[str, Any]) -> nn.Module:
    """Return a module of a class by name, its tensors on the meta device.

    Args:
        name: "torch.nn.Linear", for example.
        settings: its arguments.

    Raises:
        ArchiveError: if archives hold no such class, or it does not take these arguments.
    """
    cls = _classes().get(name) if isinstance(name, str) else None
    if cls is None or not isinstance(name, str):
        raise ArchiveError(f"{name!r} is no module that an archive may hold, or this torch lacks it")
    unknown = settings.keys() - set(_argument_names(name))
    if unknown or not all(map(_is_plain, settings.values())):
        raise ArchiveError(f"{name} does not take these settings: {', '.join(sorted(unknown)) or settings}")
    layers = settings.get("num_layers")
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise ArchiveError(f"{name} has {layers} layers; at most {_MOST_LAYERS} are read")
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of arguments that the model was built with, and warned about, before
            return cls(**settings)
    except (TypeError, ValueError, RuntimeError, AssertionError, ArithmeticError, LookupError, AttributeError) as error:
        raise ArchiveError(f"{name} cannot be built from its settings: {one_line(error)}") from error


@cache
def _argument_names(name: str) -> Sequence[str]:
    short = name.rpartition(".")[2]
    if short in _SETTINGS:
        return _SETTINGS[short]
    given = inspect.signature(_classes()[name]).parameters
    return [key for key in given if key not in ("device", "dtype") and not key.startswith("_")]


def _has_setting(module: nn.Module, key: str) -> bool:
    return key in _TENSOR_FLAGS or hasattr(module, key) or (key == "bias" and hasattr(module, "in_proj_bias"))


def _setting(module: nn.Module, key: str) -> Any:
    if key == "bias" and not hasattr(module, "bias"):
        return getattr(module, "in_proj_bias") is not None  # noqa: B009  a module declares any attribute a module
    value = getattr(module, _TENSOR_FLAGS.get(key, key))
    asks_for_tensor = isinstance(value, Tensor) or key in _TENSOR_FLAGS or (key == "bias" and value is None)
    return value is not None if asks_for_tensor else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, cast("Sequence[Any]", value)))
    return isinstance(value, _PLAIN)


def _is_alike(module: nn.Module, rebuilt: nn.Module) -> bool:
    """Say whether two modules of one class behave alike, but for the values of their tensors."""
    if _shapes(module) != _shapes(rebuilt):
        return False
    theirs = vars(module)
    settings = {key: value for key, value in vars(rebuilt).items() if key != "training" and _is_plain(value)}
    if any(key not in theirs or theirs[key] != value for key, value in settings.items()):
        return False
    inner = [(name, type(child)) for name, child in module.named_children()]
    return inner == [(name, type(child)) for name, child in rebuilt.named_children()]


def _shapes(module: nn.Module) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for prefix, part in modules_by_name(module).items():
        for name, tensor in (*own_parameters(part).items(), *own_buffers(part).items()):
            tensors[f"{prefix}.{name}"] = None if tensor is None else tensor.shape
    return tensors
