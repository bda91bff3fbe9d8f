"""What a pass finds, and which of it no pass may rewrite."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from ...compat import submodule
from ...errors import CaptureError, PassError, UsageError
from ...runtime.graphs import specializations_of
from ...runtime.state import holder_of
from ...tracing.program import Program
from ..contract import Pass
from ..rewriting import Snapshot, UnnotedChange, only_reading
from ..sites import VOLATILE, Cause, Phase, Reason, Refusal, Site, is_volatile
from ..timing import Stage, kinds_within
from ..verification import depends_on_mode
from .context import RunContext
from .tuner import Tuner

__all__ = ["admitted", "admitted_site", "found", "key_of"]


def found(tuner: Tuner, pass_: Pass, snapshot: Snapshot) -> list[Site | Refusal]:
    """Return a pass's sites and refusals, checked for being that.

    Raises UsageError as `find` does; PassError if `find` raises anything else, hangs, or changes something.
    """

    def find() -> list[Any]:
        program = tuner.context.program
        with only_reading(program, snapshot):
            return list(pass_.find(program))

    try:
        items = tuner.supervised(pass_, lambda: "find", find)
    except UnnotedChange as change:
        why = f"find must change nothing, but it {change.what}; in rewrite, use {change.instead}"
        raise PassError(f"pass '{pass_.name}': {why}") from change
    except PassError as failure:
        if isinstance(failure.__cause__, UsageError):  # what the user asked of the pass cannot be done with this model
            raise _naming(pass_, failure.__cause__) from failure
        raise
    wrong = next((item for item in items if not isinstance(item, (Site, Refusal))), None)
    if wrong is not None:
        raise PassError(f"pass '{pass_.name}': find yielded {type(wrong).__name__}, expected a Site or a Refusal")
    reasons: list[Any] = [item.reason for item in items if isinstance(item, Refusal)]
    if not all(isinstance(reason, (str, Reason)) for reason in reasons):
        raise PassError(f"pass '{pass_.name}': find yielded a Refusal whose reason is no text")
    return items


def _naming(pass_: Pass, error: UsageError) -> UsageError:
    said = str(error)
    return error if said.startswith("pass '") else type(error)(f"pass '{pass_.name}' (find): {said}")


def admitted(tuner: Tuner, pass_: Pass) -> list[Site | Refusal]:
    """Return what a pass finds; sites that nothing may be done at are refusals."""
    context, budget = tuner.context, tuner.context.budget
    with budget.spending(Stage.FINDING), kinds_within(lambda: budget.for_sites - budget.spent):
        items = found(tuner, pass_, context.snapshot)
        return [admitted_site(context, pass_, item) if isinstance(item, Site) else item for item in items]


def admitted_site(context: RunContext, pass_: Pass, item: Site) -> Site | Refusal:
    """Return a site, or a refusal where nothing may be done there; raise PassError where it is not there."""
    program = context.program
    for place in item.places:
        what = "whose owner is not there"
        try:
            program.module(place.owner)
            what = "with a node that is not there"
            for name in place.nodes.values():
                _check_node(program, place, name.partition("/")[0])
        except CaptureError as error:
            raise PassError(f"pass '{pass_.name}': find yielded a site {what}: {error}") from error
    reasons = (_reason_against(program, pass_, place, item.phase, context.trained) for place in item.places)
    reason = next(filter(None, reasons), None)
    return item if reason is None else Refusal(reason, item.owner or "(root)")


def _check_node(program: Program, site: Site, name: str) -> None:
    """Make sure that a graph of a site's owner has a node; a site for several modes may name those of all graphs."""
    try:
        program.node(site.owner, name, site.specialization)
    except CaptureError:
        others = specializations_of(program.module(site.owner))
        if all(name not in (node.name for node in each.graph.nodes) for each in others):
            raise


def _reason_against(
    program: Program, pass_: Pass, site: Site, phase: Phase | None, trained: Collection[nn.Module]
) -> Reason | None:
    """Return why no pass may rewrite a place, if so."""
    holder = holder_of(program.model, site.owner).module
    if is_volatile(holder):
        return Reason.of(Cause.VOLATILE, VOLATILE)
    if (phase or pass_.phase) is Phase.EVAL and _is_trained(program, site, trained):
        return Reason.of(Cause.IN_TRAINING)
    exact = program.exact_types.get(holder)
    return Reason.of(Cause.EXACT_TYPE, exact) if exact else None


def _is_trained(program: Program, site: Site, trained: Collection[nn.Module]) -> bool:
    """Say whether a site is in training: the modules that it calls, where their mode counts, else the one around it."""
    called = [module for module in _called(program, site) if depends_on_mode(module)]
    return any(module in trained for module in called or [holder_of(program.model, site.owner).module])


def _called(program: Program, site: Site) -> Iterator[nn.Module]:
    nodes = {node.name: node for node in program.graph(site.owner, site.specialization).nodes} if site.nodes else {}
    for name in site.nodes.values():
        if name in nodes and nodes[name].op == "call_module":
            called = submodule(program.module(site.owner), str(nodes[name].target))
            if called is not None:
                yield called


def key_of(item: Site | Refusal) -> str:
    """Return what tells the findings of one pass apart."""
    return item.key if isinstance(item, Site) else f"{item.at}: {item.reason}"
