"""Find members that compute alike: packs of operations, the ensembles that they make up, and what hinders fusing."""

from __future__ import annotations

from .canonicalization import gives_new_value, may_share_memory, same_shape, writes_to_fresh_value
from .gradient_reach import GradientReach, used_by
from .isomorphism import find_ensembles
from .packs import Ensemble, Flags, Gathered, Join, Operand, Pack, Parameters, Selected, Shared, attribute, is_stacked
from .places import Case, Place, places_of, present_cases, rewritten_specializations

__all__ = [
    "Case", "Ensemble", "Flags", "Gathered", "GradientReach", "Join", "Operand", "Pack", "Parameters", "Place",
    "Selected", "Shared", "attribute", "find_ensembles", "gives_new_value", "is_stacked", "may_share_memory",
    "places_of", "present_cases", "rewritten_specializations", "same_shape", "used_by", "writes_to_fresh_value",
]  # fmt: skip
