"""One table of what is known of each operator; tracing and passes read it, other packages add to it."""

from .arguments import CallArguments, normalized_arguments
from .attention import hidden_scores, hides_later, scaled_dot_product_attention
from .cache import Cache, Unchanged, is_dense, sample_of, why_not_plain, why_unseen
from .calls import (
    canonical_name,
    function_of,
    function_path,
    has_random_effects,
    in_place_signature,
    info_of,
    is_known_function,
    mutates,
    reached,
    resolve,
    upwards,
)
from .derived import Derived, Keeping, derived
from .flops import counted_flops, flops_of
from .info import Chance, OpInfo
from .layout import CHANNELS_LAST, laid_last
from .registry import Registration, operator_info, operator_of_module, register_operator

__all__ = [
    "CHANNELS_LAST", "Cache", "CallArguments", "Chance", "Derived", "Keeping", "OpInfo", "Registration", "Unchanged",
    "canonical_name", "counted_flops", "derived", "flops_of", "function_of", "function_path", "has_random_effects",
    "hidden_scores", "hides_later", "in_place_signature", "info_of", "is_dense", "is_known_function", "laid_last",
    "mutates", "normalized_arguments", "operator_info", "operator_of_module", "reached", "register_operator", "resolve",
    "sample_of", "scaled_dot_product_attention", "upwards", "why_not_plain", "why_unseen",
]  # fmt: skip
