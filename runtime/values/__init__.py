"""Values of models and their modules: structure, names, signatures, kinds of modules, random states."""

from __future__ import annotations

from .autograd_functions import FunctionCall, LeafCall, leaf
from .context_flag import ContextFlag
from .dynamic import (
    Quiet,
    Remade,
    cached_by_class,
    class_recipe,
    empty_module,
    in_class,
    remade_by,
    same_kind,
    subclass,
    user_class,
)
from .generators import ANNOUNCES, RandomState, announce, generators_now, take_back
from .held_tensors import ChangeCounts, change_count, held_tensors, plain_tensors
from .leaves import CONTAINERS, counts_items, is_container, is_leaf, is_library, is_scripted, runs_as_sequential
from .meta import Meta, TensorMeta, meta_key, meta_of
from .names import (
    INTERNAL,
    ModelNames,
    all_inside,
    all_tensors,
    is_meta,
    is_sharded,
    own_part,
    qualified,
    tensors_by_name,
    whole_tensor,
)
from .objects import (
    copied_object,
    has_attributes,
    is_namedtuple,
    is_object,
    is_whole,
    objects_in,
    parts_of,
    state_of,
    tensors_in,
    tensors_within,
)
from .plain_types import DTYPES, PLAIN_TYPES, Factors, is_plain_structure
from .rollback import Kept, Path, announce_changes, changed_paths, contents, graft, keep, put_members_back, same_members
from .signature import Absent, Signature, given, signature_of
from .structure import (
    Arguments,
    TensorFunction,
    aliased,
    are_plain,
    copied,
    flatten,
    map_leaves,
    map_tensors,
    plain,
    requires_grad,
    structure,
)

__all__ = [
    "ANNOUNCES", "CONTAINERS", "DTYPES", "INTERNAL", "PLAIN_TYPES", "Absent", "Arguments", "ChangeCounts",
    "ContextFlag", "Factors",
    "FunctionCall", "Kept", "LeafCall", "Meta", "ModelNames", "Path", "Quiet", "RandomState", "Remade", "Signature",
    "TensorFunction", "TensorMeta", "aliased", "all_inside", "all_tensors", "announce", "announce_changes", "are_plain",
    "cached_by_class", "change_count", "changed_paths", "class_recipe", "contents", "copied", "copied_object",
    "counts_items", "empty_module", "flatten", "generators_now", "given", "graft", "has_attributes", "held_tensors",
    "in_class", "is_container", "is_leaf", "is_library", "is_meta", "is_namedtuple", "is_object", "is_plain_structure",
    "is_scripted", "is_sharded", "is_whole", "keep", "leaf", "map_leaves", "map_tensors", "meta_key", "meta_of",
    "objects_in", "own_part", "parts_of", "plain", "plain_tensors", "put_members_back", "qualified", "remade_by",
    "requires_grad", "runs_as_sequential", "same_kind", "same_members", "signature_of", "state_of", "structure",
    "subclass", "take_back", "tensors_by_name", "tensors_in", "tensors_within", "user_class", "whole_tensor",
]  # fmt: skip
