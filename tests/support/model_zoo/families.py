"""Families of `transformers`, drawn by a seed from its own registry, each as one small model with random weights."""

from __future__ import annotations

import dataclasses
import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn
from transformers.models.auto import configuration_auto, modeling_auto

from .example_inputs import InputError, Recipe, find_recipe
from .shrinking import RECIPES, shrunk

__all__ = ["KINDS", "SEED", "BuildError", "Family", "Member", "build", "drawn", "family_of"]

SEED = 20261121
KINDS = {
    "text": 18,
    "vision": 14,
    "encoder-decoder": 8,
    "mixture": 8,
    "audio": 7,
    "state-space": 6,
    "multimodal": 6,
}
"""Kinds of models, and how many families of each are drawn."""

LARGEST = 60_000_000
"""Parameters; families that no recipe makes smaller are left out, and listed."""

_STATE_SPACE = re.compile(r"mamba_.*|ssm_.*|state_size|rescale_every|lru_width|linear_conv_kernel_dim")
_MIXTURE = re.compile(r"(moe_)?(num|n)_(local_|routed_)?experts")
_AUDIO = ("AUDIO_CLASSIFICATION", "CTC", "SPEECH_SEQ_2_SEQ", "AUDIO_XVECTOR", "TEXT_TO_WAVEFORM", "AUDIO_FRAME")
_VISION = ("IMAGE_CLASSIFICATION", "BACKBONE", "OBJECT_DETECTION", "SEGMENTATION", "VIDEO", "DEPTH", "MASKED_IMAGE")


@dataclass(frozen=True)
class Family:
    """One entry of the registry: its name there, its kind, and the classes to build, the first that works."""

    name: str
    kind: str
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Member:
    """One model of a family, in evaluation mode, with what makes inputs for it.

    Attributes:
        recipe: how its configuration was made small.
    """

    family: Family
    model: nn.Module
    inputs: Recipe
    recipe: str


class BuildError(Exception):
    """A family cannot be built by any recipe."""


def drawn(kind: str, seed: int = SEED) -> Iterator[Family]:
    """Yield all families of a kind in the order in which the seed draws them."""
    tasks = _tasks()
    names = sorted(modeling_auto.MODEL_MAPPING_NAMES)
    generator = random.Random(f"{seed} {kind}")
    generator.shuffle(names)
    for name in names:
        if _kind(name) == kind:
            base = _base(name)
            heads = sorted({cls for classes in tasks.get(name, {}).values() for cls in classes} - {base})
            first = generator.choice([base, *heads])
            yield Family(name, kind, tuple(dict.fromkeys([first, base])))


def family_of(name: str) -> Family:
    """Return a family by its name in the registry, as its base model."""
    return Family(name, _kind(name), (_base(name),))


def build(family: Family) -> Member:
    """Return a small model of a family that runs on inputs made for it.

    Raises:
        BuildError: with the reason of each recipe.
    """
    reasons: dict[str, str] = {}
    for name in family.classes:
        for recipe in RECIPES:
            torch.manual_seed(0)
            try:
                model = _model(family.name, name, recipe)
                return Member(family, model, find_recipe(model), recipe)
            except InputError as error:
                reasons[f"{name}, {recipe}"] = str(error)
            except Exception as error:
                reasons[f"{name}, {recipe}"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    raise BuildError("; ".join(f"{where}: {reason}" for where, reason in reasons.items()))


def _base(name: str) -> str:
    base = modeling_auto.MODEL_MAPPING_NAMES[name]
    return base if isinstance(base, str) else base[0]


def _model(family: str, name: str, recipe: str) -> nn.Module:
    model_class: Any = getattr(transformers, name)
    config_class = getattr(model_class, "config_class", None) or configuration_auto.CONFIG_MAPPING[family]
    config = shrunk(config_class, recipe)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model_class(config).parameters())
    if count > LARGEST:
        raise InputError(f"{count:,} parameters are too many")
    return model_class(shrunk(config_class, recipe)).eval()


@cache
def _tasks() -> dict[str, dict[str, list[str]]]:
    """Return family -> task -> classes, of every mapping in the registry."""
    found: dict[str, dict[str, list[str]]] = {}
    for mapping in dir(modeling_auto):
        if not re.fullmatch(r"MODEL_FOR_.*_MAPPING_NAMES", mapping):
            continue
        task = mapping.removeprefix("MODEL_FOR_").removesuffix("_MAPPING_NAMES")
        for name, classes in getattr(modeling_auto, mapping).items():
            found.setdefault(name, {})[task] = [classes] if isinstance(classes, str) else list(classes)
    return found


@cache
def _kind(name: str) -> str:
    tasks = _tasks().get(name, {})
    fields = {field.name: field.default for field in dataclasses.fields(configuration_auto.CONFIG_MAPPING[name])}
    signs = {
        "state-space": any(_STATE_SPACE.fullmatch(field) for field in fields),
        "mixture": any(_MIXTURE.fullmatch(field) for field in fields),
        "audio": any(task.startswith(_AUDIO) for task in tasks),
        "multimodal": any(field.endswith("_config") and field != "quantization_config" for field in fields),
        "vision": any(word in task for task in tasks for word in _VISION)
        or ("patch_size" in fields and "vocab_size" not in fields),
        "sound": "sampling_rate" in fields or "num_mel_bins" in fields,
        "encoder-decoder": fields.get("is_encoder_decoder") is True,
        "text": "vocab_size" in fields,
    }
    kind = next((kind for kind, holds in signs.items() if holds), "other")
    return "audio" if kind == "sound" else kind
