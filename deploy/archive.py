"""Archives: how to build the original model, what was done to it, and its weights; never a pickle."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import has_hooks, modules_by_name
from ..errors import ArchiveError, InputError, PlanError, StateError, UsageError, one_line
from ..passes.pipeline import parse
from ..runtime.record import Plan, Record
from ..runtime.state import StateMap
from ..tracing.examples import Inputs
from ..tracing.program import Unmade, calls_of_forms, packages_of
from ..version import VERSION
from .container import (
    WEIGHTS,
    read_container,
    read_json,
    read_manifest,
    read_weights,
    stored_once,
    weights_bytes,
    write_container,
)
from .factory import build_model, find_factory, is_trusted, module_of, name_class, owner_of
from .source import inputs_beside

__all__ = ["Replay", "check_kind", "factory_of", "load", "plan_of", "save"]

KIND = "recipe"
FORMER_KIND = "standalone"
PLAN = "plan.json"

_CAPTURING = "_output_capturing_hooks_installed"
"""Where transformers notes that a first call with `output_hidden_states=True` put hooks on a model's parts."""


Replay = Callable[..., nn.Module]
"""From a model, a plan, a phase and inputs to the model rewritten; what of inputs that were `drawn` is not compared."""


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    record: Record,
    state: Mapping[str, Tensor],
    factory: str | None = None,
) -> None:
    """Write an optimized model with its state dict under the original names, whole or not at all; see `fxopt.save`."""
    if factory is not None:
        find_factory(factory)
    _check_found_again(record.plan)
    is_compact = any(step.is_compact for step in record.state_map.steps)  # and gives back what it was made from
    shape = {"state_map": record.state_map.to_json()} if is_compact else {}
    stored, aliases = stored_once(record.state_map.forward(state) if shape else state)
    modules, originals = modules_by_name(model), modules_by_name(record.skeleton)
    plan = json.dumps(record.plan.to_json(), indent=1, allow_nan=False)
    manifest: dict[str, Any] = {
        "kind": KIND,
        "fxopt": VERSION,
        "torch": str(torch.__version__),
        "factory": factory or name_class(type(record.skeleton)),
        "class": f"{type(record.skeleton).__module__}:{type(record.skeleton).__qualname__}",
        "training": model.training,
        "other_mode": [name for name, module in modules.items() if module.training != model.training],
        "hooked": [name for name, module in originals.items() if has_hooks(module)],
        "capturing": [name for name, module in originals.items() if vars(module).get(_CAPTURING)],
        "frozen": [name for name, p in record.skeleton.named_parameters() if not p.requires_grad],
        "aliases": aliases,
        "added": sorted(set(state) - set(record.skeleton.state_dict())),
        "calls": list(record.calls),
        **shape,
    }
    write_container(path, manifest, {PLAN: plan.encode(), WEIGHTS: weights_bytes(stored)})


def load(
    path: str | os.PathLike[str],
    *,
    replay: Replay,
    model: nn.Module | None = None,
    trust: Sequence[str] | bool = (),
    inputs: object = None,
) -> nn.Module:
    """Build the original or copy `model`, give it the archive's weights, and let `replay` repeat the plan on it."""
    where = Path(path)
    manifest, members = read_container(where, (PLAN, WEIGHTS))
    description = _Description(where, manifest)
    plan = Plan.from_json(read_json(where, PLAN, members[PLAN]), f"the plan in {where}")
    state = description.with_original_names(read_weights(where, members[WEIGHTS]), trust)
    if model is None:
        original = _built(description, trust)
        inputs = inputs_beside(str(description.factory)) if inputs is None else inputs
    else:
        original = copy.deepcopy(model)
    unhooked = _without_hooks(original, description)
    added = description.names("added", optional=True)
    known = {name: tensor for name, tensor in state.items() if name not in added}
    _load_weights(where, original, known, description.names("frozen"))
    try:
        fast = _replayed(replay, original, plan, inputs, description, trust)
    except PlanError as error:
        if not unhooked:
            raise
        raise ArchiveError(
            f"{where}: its plan cannot be repeated: {one_line(error)}. {', '.join(map(repr, unhooked))} had hooks when "
            "the model was optimized, which no archive holds: register them on the unoptimized model, and pass that as "
            "model="
        ) from error
    except UsageError as error:  # the passes that it names are unknown here, or in no possible order
        raise ArchiveError(f"{where}: its plan cannot be repeated: {one_line(error)}") from error
    if added:
        _load_all(where, fast, state)
    _set_modes(fast, description.training, description.names("other_mode"))
    return fast


def factory_of(path: str | os.PathLike[str]) -> str | None:
    """Return how an archive says its model is built, without building it."""
    where = Path(path)
    return _Description(where, read_manifest(where)).factory


def plan_of(path: str | os.PathLike[str]) -> Plan:
    """Return the plan in an archive; nothing that it names is imported."""
    _, members = read_container(path, (PLAN, WEIGHTS))
    return Plan.from_json(read_json(Path(path), PLAN, members[PLAN]), f"the plan in {path}")


def check_kind(where: Path, manifest: Mapping[str, Any]) -> None:
    """Raise `ArchiveError` unless an archive says how to build its model; a former kind did not."""
    kind = manifest.get("kind")
    if kind == FORMER_KIND:
        raise ArchiveError(
            f"{where} is a standalone archive, which this fxopt does not read; write the model again with fxopt.export"
        )
    if kind != KIND:
        raise ArchiveError(f"{where} is of kind {kind!r}; this fxopt loads {KIND!r}")


def _check_found_again(plan: Plan) -> None:
    """Make sure that the passes of a plan can be found by their names, as they are when an archive is loaded."""
    for text in plan.pipeline:
        try:
            parse(text)
        except UsageError as error:
            why = str(error).partition("\n")[0]
            raise UsageError(
                f"an archive names its passes, and {text!r} would not be found: {why}; register it in the entry-point "
                "group 'fxopt.passes' of a package, or use fxopt.export, or torch.save(model.state_dict(), path)"
            ) from error


class _Description:
    """The manifest, its entries checked for their types as they are read."""

    def __init__(self, where: Path, manifest: Mapping[str, Any]) -> None:
        self.where, self.manifest = where, manifest
        check_kind(where, manifest)
        self.training: bool = self._of_type("training", bool)

    @property
    def factory(self) -> str | None:
        return None if self.manifest.get("factory") is None else self._of_type("factory", str)

    def names(self, key: str, *, optional: bool = False) -> list[str]:
        return [] if optional and key not in self.manifest else [str(name) for name in self._of_type(key, list)]

    def calls(self, model: nn.Module, trust: Sequence[str] | bool) -> list[Inputs]:
        """Return calls of the form of the example's for a model; none where the archive does not tell."""
        packages = None if trust is True else {*packages_of(model), *(() if isinstance(trust, bool) else trust)}
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        try:
            return calls_of_forms(self.manifest.get("calls", []), packages=packages, device=device)
        except ValueError as error:
            raise ArchiveError(f"{self.where} is damaged: in its manifest, {error}") from error

    def with_original_names(self, stored: dict[str, Tensor], trust: Sequence[str] | bool) -> dict[str, Tensor]:
        """Return the state by its original names, tied tensors under each of theirs."""
        aliases: dict[str, Any] = self._of_type("aliases", dict)
        for alias, name in aliases.items():
            if alias in stored or not isinstance(name, str) or name not in stored:
                raise ArchiveError(f"{self.where} is damaged: {alias!r} cannot be tied to {name!r}")
        state = stored | {alias: stored[name] for alias, name in aliases.items()}
        if "state_map" not in self.manifest:
            return state
        try:
            return StateMap.from_json(self.manifest["state_map"], trust).backward(state, warn=False)
        except (StateError, RuntimeError, TypeError, ValueError) as error:
            raise ArchiveError(f"{self.where}: its weights have no original names: {one_line(error)}") from error

    def _of_type(self, key: str, kind: type) -> Any:
        value = self.manifest.get(key)
        if type(value) is not kind:
            raise ArchiveError(f"{self.where} is damaged: in its manifest {key!r} is missing or wrong")
        return value


def _replayed(
    replay: Replay,
    original: nn.Module,
    plan: Plan,
    inputs: object,
    description: _Description,
    trust: Sequence[str] | bool,
) -> nn.Module:
    """Repeat a plan on the inputs that there are, on drawn ones, or where the model refuses these, on none."""
    phase = "train" if description.training else "eval"
    try:
        calls = description.calls(original, trust)
    except Unmade as unmade:
        return _replayed_without(replay, original, plan, phase, inputs, str(unmade))
    if inputs is None and calls:
        with suppress(InputError):  # a model may take some numbers only
            return replay(original, plan, phase, calls, drawn=True)
    return replay(original, plan, phase, inputs)


def _replayed_without(
    replay: Replay, original: nn.Module, plan: Plan, phase: str, inputs: object, unmade: str
) -> nn.Module:
    """Repeat a plan on the inputs that there are; where it needs some, say why none are drawn."""
    try:
        return replay(original, plan, phase, inputs)
    except PlanError as error:
        if inputs is not None:
            raise
        package = unmade.partition(":")[0].partition(".")[0]
        raise PlanError(
            f"{one_line(error)}. None are drawn, since the example calls had a {unmade}, which is not imported, or of "
            f"no package of the model's: import it and pass trust=[{package!r}]"
        ) from error


def _without_hooks(model: nn.Module, description: _Description) -> list[str]:
    """Return the modules that had hooks and have none; what hooks transformers itself installs are installed."""
    modules = modules_by_name(model)
    library: Any = sys.modules.get("transformers.utils.output_capturing")
    for name in description.names("capturing", optional=True):
        if library is not None and hasattr(modules.get(name), "_can_record_outputs"):
            library.maybe_install_capturing_hooks(modules[name])
    hooked = description.names("hooked", optional=True)
    return [name or "(root)" for name in hooked if name not in modules or not has_hooks(modules[name])]


def _built(description: _Description, trust: Sequence[str] | bool) -> nn.Module:
    """Call the archive's factory if the user trusts its package."""
    where, factory = description.where, description.factory
    if factory is None:
        raise ArchiveError(f"{where} does not say how to build its model; pass model=")
    try:
        package = module_of(factory).split(".")[0]
        trusted = trust if isinstance(trust, bool) else is_trusted(module_of(factory), trust)
    except UsageError as error:
        raise ArchiveError(f"{where} is damaged: {one_line(error)}") from error
    if not trusted:
        raise ArchiveError(
            f"loading {where} would import and call {factory!r}; pass trust=[{package!r}] "
            f"(--trust {package} on the command line) to allow it, or pass model="
        )
    if isinstance(trust, bool):
        return build_model(factory)
    owner = owner_of(factory)
    if not is_trusted(owner, trust):
        # Else a file could have anything called that a trusted module happens to import.
        package = owner.partition(".")[0]
        raise ArchiveError(
            f"loading {where} would call {factory!r}, which comes from {owner!r}; add {package!r} to trust= "
            f"(--trust {package}, too, on the command line), or pass model="
        )
    return build_model(factory)


def _load_weights(where: Path, model: nn.Module, state: Mapping[str, Tensor], frozen: Sequence[str]) -> None:
    """Give a model the weights, in the dtypes they were saved in, and its frozen parameters."""
    for name, tensor in (*model.requires_grad_(False).named_parameters(), *model.named_buffers()):
        if name in state and tensor.dtype != state[name].dtype:
            tensor.data = tensor.data.to(state[name].dtype)
    for name, parameter in model.named_parameters():
        differentiable = parameter.is_floating_point() or parameter.is_complex()
        parameter.requires_grad_(differentiable and name not in frozen)
    _load_all(where, model, state)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ArchiveError(f"{name!r} is on the meta device; build the model on a real one to load {where}")


def _load_all(where: Path, model: nn.Module, state: Mapping[str, Tensor]) -> None:
    try:
        model.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        raise ArchiveError(f"the weights in {where} do not fit the model: {one_line(error)}") from error


def _set_modes(model: nn.Module, training: bool, others: Sequence[str]) -> None:
    """Restore the training flag of each module; some may differ from the root's."""
    model.train(training)
    modules = modules_by_name(model)
    for name in others:
        if name in modules:
            modules[name].training = not training
