"""Whole residual blocks: the items of a list that give what they are given, with something added."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...compat import all_modules, modules_by_name, own_children
from ...errors import InputError
from ...layers.resized import hidden_state
from ...passes.contract import word_for
from ...runtime.values import qualified, tensors_by_name, tensors_in, user_class
from ...tracing.isolation import copied_module, in_phase, preserved
from ...tracing.program import Program, TensorOwners
from ...tracing.recording import calls_intercepted, copy_inputs
from .batches import run_batches
from .dependency_groups import CACHED, Coupling, Cut, Group, Refused, cached_in, weights_of
from .options import Options

__all__ = ["blocks_of", "influences"]

_ATTENTION = "attention"
"""What the kinds of layers end with that keep nothing for the next call but keys and values, but for linear ones."""


@dataclass
class _Seen:
    """What a run shows of a block.

    Attributes:
        other: why it cannot be left out, or "".
        is_plain: it is none that could be: it gives another shape, or nothing reaches its result around its weights.
        length: of the tuple that it gives.
        is_cached: the model's result holds something for the next call.
        turned: one minus the cosine between what it is given and gives, by call.
    """

    other: str = ""
    is_plain: bool = False
    length: int | None = None
    is_cached: bool = False
    turned: list[float] = field(default_factory=list[float])


def blocks_of(program: Program, wanted: Options) -> Coupling:
    """Return a group for each list of residual blocks, and the lists whose blocks stay; the outermost lists count."""
    if not program.whole_calls:
        raise InputError("pruning needs example_inputs: a run of the model shows which modules are residual blocks")
    lists = _lists(program)
    seen = _watched(program, [item for items in lists.values() for item in items], wanted=None)
    is_cached = any(each.is_cached for each in seen.values())
    groups, refused = list[Group](), list[Refused]()
    for name, items in lists.items():
        known = (*(group.name for group in groups), *(each.layer for each in refused))
        blocks = {item: seen[item] for item in items if item in seen and not seen[item].is_plain}
        if len(blocks) < 2 or any(name.startswith(f"{other}.") for other in known):
            continue
        reason = next((each.other for each in blocks.values() if each.other), None) or _shared(program, blocks)
        kinds = {block: _kind_in_cache(program.module(block)) for block in blocks}
        if any(kinds.values()):
            reason = reason or _obstacle_in_cache(kinds.values()) or (CACHED if is_cached else None)
        free = [each for each in _without_firsts(kinds) if not word_for(wanted.keep, each, program)]
        if reason is not None or len(free) < 2:
            refused.append(Refused(name, f"its blocks stay: {reason or 'fewer than two of them may go'}"))
        else:
            groups.append(_group(program, name, free, seen))
    return Coupling(tuple(groups), tuple(refused))


def influences(program: Program, wanted: Options, blocks: Sequence[str]) -> list[float]:
    """Return of each block one minus the cosine between what it is given and gives, in the mean over places and calls.

    Men et al., ShortGPT: Layers in Large Language Models are More Redundant Than You Expect, 2024, equation 1.
    """
    seen = _watched(program, blocks, wanted=wanted)
    return [sum(each.turned) / max(len(each.turned), 1) for each in (seen[name] for name in blocks)]


def _lists(program: Program) -> dict[str, list[str]]:
    """Return the lists of modules with the names of their items that have matrices, the outermost lists first."""
    found: dict[str, list[str]] = {}
    for name, module in program.names.modules.items():
        if name and isinstance(module, (nn.ModuleList, nn.Sequential)):
            items = {qualified(name, last): child for last, child in own_children(module).items()}
            found[name] = [each for each, child in items.items() if child is not None and _matrices(child)]
    return dict(sorted(found.items(), key=lambda each: each[0].count(".")))


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    return [each for each in module.parameters() if each.dim() > 1 and each.numel()]


def _watched(program: Program, blocks: Iterable[str], *, wanted: Options | None) -> dict[str, _Seen]:
    """Return what a run shows of blocks: on the example inputs, or on the batches of what is wanted."""
    names = {program.module(block): block for block in blocks}
    seen: dict[str, _Seen] = defaultdict(_Seen)

    def watch(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module not in names:
            return original(module, *args, **kwargs)
        is_new, call = names[module] not in seen, copy.deepcopy((args, kwargs))  # caches grow in the call
        result = original(module, *args, **kwargs)
        _note(seen[names[module]], module, call, result, is_new=is_new and wanted is None)
        return result

    with preserved(program.model), in_phase(program.model, False), torch.no_grad(), calls_intercepted(watch):
        if wanted is not None and wanted.data is not None:
            run_batches(program.model, wanted)
            return seen
        for call in program.whole_calls:
            result = copy_inputs(call).run(program.model)
            for each in seen.values() if cached_in(result) else ():
                each.is_cached = True
    return seen


def _note(seen: _Seen, module: nn.Module, call: tuple[Any, Any], result: Any, *, is_new: bool) -> None:
    given, tensors = hidden_state(*call), list(tensors_in(result))
    if given is not None and not given.numel():
        return
    is_stream = given is not None and given.is_floating_point() and given.dim() > 1
    if given is None or not is_stream or not tensors or tensors[0].shape != given.shape:
        seen.is_plain = True
        return
    if is_new:
        seen.length = None if isinstance(result, Tensor) else len(result)
        seen.is_plain = not _is_residual(module, call)
    if not isinstance(result, Tensor) and (
        type(result) is not tuple or len(tensors) > 1 or tensors[0] is not result[0]
    ):
        seen.other = "they give other things besides the stream"
    channels = 1 if given.dim() > 3 else -1
    seen.turned.append(float(1 - torch.cosine_similarity(given.double(), tensors[0].double(), channels).mean()))


def _is_residual(module: nn.Module, call: tuple[Any, Any]) -> bool:
    """Say whether what a block is given reaches its result around its matrices: they are zeros in a copy of it."""
    made = copied_module(module).eval()
    for parameter in _matrices(made):
        parameter.data.zero_()
    results: list[Tensor] = []
    for _ in range(2):
        args, kwargs = copy.deepcopy(call)
        results += [next(tensors_in(made(*args, **kwargs)))]
        given = cast("Tensor", hidden_state(*call))
        given.data = (
            1 - given.data.nan_to_num()
        )  # in memory of its own: a tensor that was expanded cannot be written to
    return not torch.allclose(*results, rtol=0, atol=0, equal_nan=True)


def _shared(program: Program, blocks: Iterable[str]) -> str | None:
    """Return which tensor of blocks is that of others, too."""
    owners = program.analyses[TensorOwners]
    for name in tensors_by_name(program.model):
        if len(owners.names(name)) > 1 and any(name.startswith(f"{block}.") for block in blocks):
            return f"'{name}' is a tensor of several modules"
    return None


def _obstacle_in_cache(kinds: Iterable[str | None]) -> str | None:
    """Return why no layer can go of those of some kinds."""
    for kind in kinds:
        if kind and (not kind.endswith(_ATTENTION) or kind.startswith("linear")):
            return f"code asks layers by their number for a state that is no keys and values ({kind})"
    return None


def _without_firsts(kinds: Mapping[str, str | None]) -> list[str]:
    """Return the blocks that can go: of those in a cache, the first of each kind is asked how long the cache is."""
    firsts = {kind: block for block, kind in reversed(list(kinds.items())) if kind is not None}
    return [block for block in kinds if block not in firsts.values()]


def _kind_in_cache(block: nn.Module) -> str | None:
    """Return of which kind a block's part of a cache is; None where it has none."""
    numbered = [module for module in all_modules(block) if type(getattr(module, "layer_idx", None)) is int]
    for module in numbered:
        kinds, number = getattr(getattr(module, "config", None), "layer_types", None), cast("Any", module).layer_idx
        if kinds and number < len(kinds):
            return str(kinds[number])
    names = [user_class(type(module)).__name__.lower() for module in numbered]
    return next((_ATTENTION for name in names if _ATTENTION in name), names[0] if names else None)


def _group(program: Program, name: str, blocks: Sequence[str], seen: Mapping[str, _Seen]) -> Group:
    cuts = [
        Cut(qualified(qualified(block, path), last), 0, (unit,) * len(tensor))
        for unit, block in enumerate(blocks)
        for path, module in modules_by_name(program.module(block)).items()
        for last, tensor in weights_of(module).items()
        if tensor.dim()
    ]
    lengths = tuple(seen[block].length for block in blocks)
    return Group(name, "blocks", len(blocks), tuple(cuts), blocks=tuple(zip(blocks, lengths, strict=True)))
