"""Compact checkpoints: the weights of a pruned model in their real sizes, for code that does not know fxopt."""

from __future__ import annotations

import copy
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..compat import modules_by_name, own_children, tensor_at, transient_buffers
from ..errors import ArchiveError, StateError, UnverifiedWarning, UsageError, one_line
from ..passes.verification import form_difference
from ..runtime.record import Record
from ..runtime.state import Select, StateMap
from ..runtime.values import map_tensors, qualified, tensors_in, user_class
from ..storage import write_atomically
from ..tracing.examples import Inputs
from ..tracing.isolation import in_phase
from ..tracing.program import Unmade, calls_of_forms
from ..tracing.recording import copy_inputs
from . import compact_loader
from .compact_configuration import ShorterLists, built, configuration_of, padded
from .container import stored_once, weights_bytes

__all__ = ["save_compact"]

_CUTTING = ("prune",)
_ROUNDING = 32
_SMALLEST = 1e-30
_UNCOMPARED = (
    "the compact model was not compared with the pruned one, as no form of example calls is known: give example_inputs "
    "to optimize"
)
_INSTEAD = "fxopt.save keeps it as an archive, fxopt.export as a .pt2 file"


def save_compact(model: nn.Module, folder: Path, *, record: Record, state: Mapping[str, Tensor]) -> None:
    """Write a pruned model, whose state dict with original names is `state`; see `fxopt.save_compact`."""
    folder.mkdir(parents=True, exist_ok=True)
    lists = _lists(record)
    cut = lists.of(_cut_state(record, state))
    calls = _calls(model, record)
    plain = _built_by_configuration(model, cut, lists, calls)
    if plain is not None:
        plain.save_pretrained(folder)
        return
    _write_with_loader(model, folder, record, cut, lists, calls)


def _cut_state(record: Record, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a model under their original names, without what pruning took away."""
    steps = record.state_map.steps
    cuts = tuple(step for step in steps if isinstance(step, Select))
    if not cuts:
        raise UsageError(
            "nothing was cut out of this model, so that there is nothing to leave out; prune it with "
            "prune{method=structured}, or save its state dict"
        )
    if any(step.is_compact and not isinstance(step, Select) for step in steps):
        raise UsageError(f"this model is quantized, which plain code cannot run; {_INSTEAD}")
    try:
        return StateMap(cuts, record.state_map.aliases).forward(state)
    except StateError as error:
        raise StateError(f"other passes merged tensors before they were cut; prune first: {one_line(error)}") from error


def _calls(model: nn.Module, record: Record) -> list[Inputs]:
    """Return calls in the form of the examples, to compare with."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with suppress(Unmade):
        return [call for call in calls_of_forms(list(record.calls), device=device) if call.is_of_model]
    return []


def _built_by_configuration(
    model: nn.Module, cut: Mapping[str, Tensor], lists: ShorterLists, calls: Sequence[Inputs]
) -> Any:
    """Return the model that the class's own code builds, with the tensors in it; None where no configuration fits."""
    config, cls = getattr(model, "config", None), cast("Any", user_class(type(model)))
    if not (hasattr(config, "to_dict") and hasattr(cls, "from_pretrained")):
        return None
    new = configuration_of(cls, config, {name: tensor.shape for name, tensor in cut.items()}, lists)
    shapes = None if new is None else built(cls, new)
    if shapes is None:
        return None
    for parts in (1, 2):  # of gates and values in one tensor, each has a half
        plain = cls(copy.deepcopy(new)).to(next(iter(cut.values())).device).eval()
        plain.load_state_dict({name: padded(tensor, shapes[name], parts) for name, tensor in cut.items()})
        plain.to(getattr(model, "dtype", torch.float32))
        if not _difference(model, plain, calls):
            if hasattr(model, "generation_config"):
                plain.generation_config = copy.deepcopy(model.generation_config)
            return plain
    return None


def _write_with_loader(
    model: nn.Module, folder: Path, record: Record, cut: dict[str, Tensor], lists: ShorterLists, calls: Sequence[Inputs]
) -> None:
    """Write tensors, sizes and the function that gives both to an unpruned model, if that model then does the same."""
    stored, tied = stored_once({**cut, **lists.of(_transient(model, record))})
    sizes = {"gone": lists.gone, "attributes": lists.of(_attributes(record)), "tied": tied}
    files = {
        "model.safetensors": weights_bytes(stored),
        "sizes.json": json.dumps(sizes, indent=1).encode(),
        "compact_loader.py": Path(compact_loader.__file__).read_bytes(),
    }
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        for name, data in files.items():
            (Path(temporary) / name).write_bytes(data)
        original = copy.deepcopy(record.skeleton).to_empty(device="cpu")
        plain = compact_loader.load(original, Path(temporary))
        why = _difference(model, plain, calls)
    if why:
        raise ArchiveError(
            f"{os.fspath(folder)!r} was not written: the code of this {user_class(type(model)).__name__} does not run "
            f"with the sizes that are left: {why}. {_INSTEAD}"
        )
    for name, data in files.items():
        write_atomically(folder / name, data)


def _transient(model: nn.Module, record: Record) -> dict[str, Tensor]:
    """Return the buffers that no state dict has: the skeleton has none of their numbers."""
    found = {
        f"{path}.{name}".lstrip("."): tensor_at(model, f"{path}.{name}".lstrip("."))
        for path, module in modules_by_name(record.skeleton).items()
        for name in transient_buffers(module)
    }
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _sites(record: Record) -> Iterator[Mapping[str, Any]]:
    """Yield the sites at which something was cut."""
    for decision in record.plan.decisions:
        if decision.status == "applied" and decision.site is not None and decision.pass_name in _CUTTING:
            yield decision.site


def _lists(record: Record) -> ShorterLists:
    """Return the lists of which whole blocks are gone."""
    gone = [qualified(site["owner"], name) for site in _sites(record) for name, _ in site["data"].get("skipped", ())]
    lists: dict[str, dict[str, bool]] = {}
    for name in dict.fromkeys(each.rpartition(".")[0] for each in gone):
        items = own_children(record.skeleton.get_submodule(name))
        lists[name] = {last: qualified(name, last) not in gone for last in items}
    return ShorterLists(lists)


def _attributes(record: Record) -> dict[str, Any]:
    """Return the numbers among modules' attributes that became smaller, by the attribute's qualified name."""
    found: dict[str, Any] = {}
    for site in _sites(record):
        for path, name, index, gone in site["data"].get("attributes", ()):
            module = qualified(site["owner"], path)
            key = qualified(module, name)
            value = found.get(key, getattr(record.skeleton.get_submodule(module), name))
            if index is None:
                found[key] = value - gone
            else:
                found[key] = [each - gone if at == index else each for at, each in enumerate(value)]
    return found


def _difference(model: nn.Module, plain: nn.Module, calls: Sequence[Inputs]) -> str:
    """Return why a plain model gives something else than the pruned one, or ""; in float64 where both run in it."""
    if not calls:
        warnings.warn(_UNCOMPARED, UnverifiedWarning, stacklevel=5)
    for call in calls:
        try:
            expected, exact = _results(copy.deepcopy(model).double(), _doubled(call)), True
        except Exception:  # kernels and casts may take float32 only
            expected, exact = _results(model, call), False
        try:
            found = _results(copy.deepcopy(plain).double(), _doubled(call)) if exact else _results(plain, call)
        except Exception as error:
            return f"{type(error).__name__}: {one_line(error)}"
        if len(found) != len(expected):
            return "other results"
        for one, other in zip(expected, found, strict=True):
            if reason := form_difference(one, other) or _far(one, other):
                return reason
    return ""


def _doubled(call: Inputs) -> Inputs:
    args, kwargs = map_tensors(lambda x: x.double() if x.is_floating_point() else x, tuple(call))
    return Inputs(*args, **kwargs)


def _results(model: nn.Module, call: Inputs) -> list[Tensor]:
    with torch.no_grad(), in_phase(model, training=False):
        return list(tensors_in(copy_inputs(call).run(model)))


def _far(expected: Tensor, found: Tensor) -> str:
    """Say how far results are from each other where that is more than rounding: models of `transformers` compute in
    float32 at places, whatever they are given.
    """
    if not expected.is_floating_point():
        return "" if torch.equal(expected, found) else "other whole numbers"
    if not expected.numel():
        return ""
    error = float((expected - found).abs().max()) / max(float(expected.abs().max()), _SMALLEST)
    allowed = _ROUNDING * max(torch.finfo(expected.dtype).eps, torch.finfo(torch.float32).eps)
    return "" if error <= allowed else f"results that differ by {error:.1e} of their scale"
