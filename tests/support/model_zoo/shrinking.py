"""Make the configuration of any `transformers` family small, by the names of its fields."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

__all__ = ["RECIPES", "VOCABULARY", "shrunk"]

VOCABULARY = 128
"""Tokens that every shrunk model knows."""

Rule = tuple[str, Callable[[Any], Any]]

_LAYERS = (
    r"(.*_)?(n|num)?_?(.*_)?layers?|n_layer|depth|num_(encoder_)?blocks|num_hidden_groups|num_feedforward_networks"
)
_HEADS = r"(.*_)?(n|num)_(.*_)?heads?|(.*_)?attention_heads|num_self_attention_heads"
_KV_HEADS = r"(.*_)?(num_key_value|num_kv|kv)_(.*_)?heads|num_key_value_groups"
_HEAD_WIDTHS = r"(.*_)?head_dim|d_kv|d_head|dim_head|attention_head_size|kv_channels|global_pointer_head_size"
_WIDTHS = (
    r"(.*_)?hidden_(size|dim)|d_model|n_embd|(.*_)?emb(ed(ding)?)?_(dim|size)|dim|width|d_latents|mask_feature_size|"
    r"(.*_)?(proj|projection)_(dim|size)|codevector_dim|output_dim|fpn_hidden_size|num_filters|.*feat_dim|.*_units|"
    r"(.*_)?hidden_size_.*|lru_width|attention_hidden_size"
)
_INNER = (
    r"(.*_)?intermediate_(size|dim)|(.*_)?ffn_dim|d_?ff|n_inner|mlp_dim|(.*_)?d_inner|"
    r".*feed_?forward(_dim)?|dim_ff|ffn_hidden_size"
)
_LISTS = r"hidden_sizes|embed_dims?|neck_hidden_sizes|conv_dim|tdnn_dim|out_channels|stage_.*_channels"
_IDENTIFIERS = r".*(_id|_index)"


def _at_most(limit: int) -> Callable[[Any], Any]:
    return lambda value: min(value, limit) if type(value) is int else value


def _divided(by: int) -> Callable[[Any], Any]:
    def divide(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(divide(item) for item in value)
        return value // by if type(value) is int and value >= 8 * by and value % by == 0 else value

    return divide


def _ones(value: Any) -> Any:
    return type(value)(1 for _ in value) if isinstance(value, (tuple, list)) else _at_most(2)(value)


_ANYWHERE: tuple[Rule, ...] = (
    (r"(.*_)?vocab_size(_.*)?", _at_most(VOCABULARY)),
    (r"depths|stage_num_blocks", _ones),
    (r".*layer_(period|interval)", _at_most(2)),
    (r".*layer_offset", _at_most(1)),
    (r"first_k_dense_replace|num_dense_layers|num_kv_shared_layers", _at_most(1)),
    (r"num_nextn_predict_layers|num_mtp_layers", _at_most(1)),
    (_LAYERS, _at_most(2)),
    (r"(.*_)?(num|n)_(.*_)?experts", _at_most(4)),
    (r".*experts_per_tok|(.*_)?top_?k|num_selects|moe_k", _at_most(2)),
    (r"n_group|topk_group", _at_most(1)),
    (r".*chunk_size", lambda value: value if value < 16 else 8),
)
"""What makes any model smaller and leaves the relations between widths as they are."""

_SMALL_INPUTS: tuple[Rule, ...] = (
    (r"(.*_)?(image_size|resolution)", lambda value: type(value)(64 for _ in value) if _is_list(value) else 64),
    (r"patch_size", _at_most(8)),
    (r"max_source_positions", _at_most(32)),
    (r"(.*_)?max_(.*_)?position(_embedding)?s|n_positions|context_length", _at_most(128)),
    (r"num_frames|frames_per_clip", _at_most(4)),
    (r"num_queries|num_query_tokens|num_latents", _at_most(8)),
)

_FIXED: tuple[Rule, ...] = (
    (_KV_HEADS, _at_most(2)),
    (_HEADS, _at_most(4)),
    (_HEAD_WIDTHS, _at_most(8)),
    (_INNER, _at_most(64)),
    (_LISTS, _divided(16)),
    (_WIDTHS, lambda value: _divided(16)(value) if _is_list(value) else _at_most(32)(value)),
    (r".*lora_rank|.*d_state|(ssm_)?state_size", _at_most(8)),
)

_DIVIDED: tuple[Rule, ...] = tuple(
    (pattern, _divided(8)) for pattern in (_HEAD_WIDTHS, _INNER, _LISTS, _WIDTHS, r".*lora_rank|.*d_inner|.*_channels")
)

RECIPES: dict[str, tuple[Rule, ...]] = {
    "fixed": (*_ANYWHERE, *_SMALL_INPUTS, *_FIXED),
    "divided": (*_ANYWHERE, *_SMALL_INPUTS, *_DIVIDED),
    "divided, inputs as they are": (*_ANYWHERE, *_DIVIDED),
    "shallow": _ANYWHERE,
}
"""Ways to shrink, tried in order: fixed widths, all widths by one factor, and fewer layers only."""


def shrunk(config_class: Any, recipe: str) -> Any:
    """Return a small configuration: the class's defaults, changed by the rules of `recipe`, in parts of it too.

    Raises:
        Exception: whatever the class raises, for not every set of widths fits every family.
    """
    rules = [(re.compile(pattern), change) for pattern, change in RECIPES[recipe]]
    return config_class(**_changes(config_class, rules))


def _changes(config_class: Any, rules: list[tuple[re.Pattern[str], Callable[[Any], Any]]]) -> dict[str, Any]:
    usual = config_class()
    found: dict[str, Any] = {}
    layers = _layers_with_every_type(usual)
    for field in dataclasses.fields(config_class):
        value = getattr(usual, field.name, None)
        if hasattr(value, "to_dict"):
            found[field.name] = type(value)(**_changes(type(value), rules))
            continue
        default = _default(field)
        changed = layers if field.name == "num_hidden_layers" else _changed(field.name, default, rules)
        if changed != default:
            found[field.name] = changed
    return found


def _layers_with_every_type(config: Any) -> int:
    """Return how many layers, two at least, show each type of layer that a configuration mixes."""
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if not isinstance(types, (tuple, list)) or not types:
        return 2
    return max(2, 1 + max(types.index(kind) for kind in set(types)))


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return a field's own default: what is worked out from others (`head_dim`) is None there, and stays so."""
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def _changed(name: str, value: Any, rules: list[tuple[re.Pattern[str], Callable[[Any], Any]]]) -> Any:
    if type(value) is not int and not _is_list(value):
        return value
    if re.fullmatch(_IDENTIFIERS, name) and type(value) is int:
        return value if value < VOCABULARY // 2 else VOCABULARY // 2 + sum(map(ord, name)) % (VOCABULARY // 2)
    for pattern, change in rules:
        if pattern.fullmatch(name):
            return change(value)
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, (tuple, list))
