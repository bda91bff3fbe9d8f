"""Find what goes: single weights of layers, by masks; or units of coupled tensors, with all that mentions them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ...errors import BudgetError
from ...layers.quantized import is_quantized_by_torch
from ...passes.contract import word_for
from ...passes.sites import Refusal, Site
from ...runtime.state import packed
from ...tracing.program import Program
from .amounts import Ranking, chosen_for_target
from .batches import is_fed_plainly
from .blocks import blocks_of
from .costs import Cost, DoesNotRun, cost_of, multiples_of, with_costs
from .dependency_groups import Group, Refused, coupling
from .masks import Target, Values, chosen, kernel_for, order_of_inputs, scores_of, targets, weakest_of
from .options import Options, check_names
from .scores import CRITERIA, NoScores, scores_of_units
from .sensitivity import share_gone, with_sensitivity
from .sites import Chosen, sites_of

__all__ = ["find", "units_that_go"]

_QUANTIZED = "it is a {}, whose weight is quantized already; prune the model before it is quantized"


def find(program: Program, wanted: Options) -> Iterator[Site | Refusal]:
    """Yield a site for each layer that gets masks, or for the units that go of each group, and what is refused."""
    for module in filter(is_quantized_by_torch, program.names.distinct):
        yield Refusal(_QUANTIZED.format(type(module).__name__), program.names.name(module))
    yield from _units(program, wanted) if wanted.method == "structured" else _weights(program, wanted)


def _weights(program: Program, wanted: Options) -> Iterator[Site | Refusal]:
    found = [_as_fits(each, program, wanted) for each in targets(program, wanted.keep)]
    yield from (each for each in found if isinstance(each, Refusal))
    fitting = [each for each in found if isinstance(each, Target)]
    check_names(wanted, [each.owner for each in fitting])
    orders: dict[str, list[int]] = {}
    values = _values(program, wanted, fitting)
    gone = {target.path: target.gone for target in fitting}
    if values is not None:
        gone = _gone(fitting, wanted, values, orders)
    sites, shares = list[Site](), list[float | None]()
    owners: dict[str, list[Target]] = defaultdict(list)
    for target in fitting:
        owners[target.owner].append(target)
    for owner, mine in owners.items():
        flags = {target.name: gone[target.path] for target in mine}
        zeros = {name: int(each.sum()) for name, each in flags.items()}
        data: dict[str, Any] = {"gone": {name: packed(each) for name, each in flags.items()}, "zeros": zeros}
        if orders:
            data["order"] = {target.name: orders[target.path] for target in mine}
        detail = _detail(mine, list(flags.values()), wanted)
        if wanted.method == "nm" and wanted.schedule == "one_shot":
            data["sparse"], said = kernel_for(program, mine[0], flags[mine[0].name], wanted)
            detail = f"{detail}, {said}"
        sites.append(Site(program, owner, {}, detail=detail, data=data))
        shares.append(None if values is None else _share_of_weights(mine, flags, wanted, values))
    yield from sites if values is None else with_sensitivity(program, sites, shares)


def _values(program: Program, wanted: Options, found: Sequence[Target]) -> Values | None:
    """Return what says how much weights matter; None where none go yet."""
    if wanted.schedule != "one_shot" or not found:
        return None
    make = CRITERIA[wanted.criterion].weights
    return (lambda _, weight: weight.abs()) if make is None else make(program, wanted)


def _share_of_weights(
    targets: Sequence[Target], gone: Mapping[str, Tensor], wanted: Options, values: Values
) -> float | None:
    """Return how much of what a layer's weights matter goes."""
    given = cast("Mapping[str, Tensor]", wanted.scores or {})
    scores = [given.get(each.path, values(each.path, each.weight)) for each in targets]
    return share_gone([(score, ~gone[each.name].to(score.device)) for each, score in zip(targets, scores, strict=True)])


def _as_fits(found: Target | Refusal, program: Program, wanted: Options) -> Target | Refusal:
    """Return a target, or why its inputs make no whole groups, or are not seen."""
    if isinstance(found, Refusal):
        return found
    module = program.module(found.owner)
    if wanted.criterion == "wanda" and not (wanted.scores or is_fed_plainly(module)):
        return Refusal(f"criterion=wanda does not see what its {found.name} is multiplied with", found.owner)
    count, of = found.weight.shape[found.inputs], wanted.kept_of[1]
    reason = f"the {count} inputs of its {found.name} make no whole groups of {of}"
    return Refusal(reason, found.owner) if wanted.method == "nm" and count % of else found


def _gone(found: Sequence[Target], wanted: Options, values: Values, orders: dict[str, list[int]]) -> dict[str, Tensor]:
    """Return which elements of each weight are zero for good, by its qualified name; what was gone before stays so.

    `orders` is told in which order the inputs of each weight are grouped, if not as they lie.
    """
    if not (wanted.method == "nm" and wanted.permute):
        return chosen(found, wanted, values)
    scores, (kept, of), masks = scores_of(found, wanted, values), wanted.kept_of, dict[str, Tensor]()
    for target in found:
        order = order_of_inputs(scores[target.path], target.inputs, kept, of)
        orders[target.path] = order.tolist()
        masks[target.path] = weakest_of(scores[target.path], target.inputs, kept, of, order) | target.gone
    return masks


def _detail(targets: Sequence[Target], gone: Sequence[Tensor], wanted: Options) -> str:
    """Say how much is gone, by which pattern, and what a schedule plans."""
    zeros, size = sum(int(flags.sum()) for flags in gone), sum(flags.numel() for flags in gone)
    said = f"{zeros} of {size} weights are zero"
    pattern = ":".join(map(str, wanted.kept_of))
    if wanted.method == "nm":
        later = "" if wanted.schedule == "one_shot" else f"; a PruningSchedule brings that to it ({wanted.schedule})"
        return f"{said}, {pattern}{later}"
    if wanted.schedule != "one_shot":
        share = "of all layers" if wanted.scope == "global" else "of each layer"
        return f"{said}; a PruningSchedule brings that to {wanted.amount:g} {share} ({wanted.schedule})"
    was_zero = all(not target.weight[flags].any() for target, flags in zip(targets, gone, strict=True))
    return f"{said}, as before: nothing to do" if zeros and was_zero else said


def units_that_go(program: Program, wanted: Options) -> list[Chosen]:
    """Return which units stay, and so which go, of each group that can be pruned; BudgetError: a target is missed."""
    scored, refused = _scored(program, wanted)
    return _kept(program, scored, wanted, refused)[0]


def _units(program: Program, wanted: Options) -> Iterator[Site | Refusal]:
    scored, refused = _scored(program, wanted)
    kept, cost, failing = _kept(program, scored, wanted, refused)
    yield from _refusals((*refused, *failing))
    if kept:
        sites = list(sites_of(program, kept))
        known = {group.name: score for group, score in scored}
        sites = with_sensitivity(program, sites, [_share_of_units(site, known) for site in sites])
        yield from with_costs(program.model, kept, sites, wanted, cost)


def _share_of_units(site: Site, scores: Mapping[str, Tensor]) -> float | None:
    """Return how much of the scores of a site's units goes."""
    kept = {name: torch.tensor(kept, dtype=torch.long) for name, (_, _, kept) in site.data["units"].items()}
    return share_gone([(scores[name], stays) for name, stays in kept.items()])


def _scored(program: Program, wanted: Options) -> tuple[list[tuple[Group, Tensor]], list[Refused]]:
    """Return the groups that can be pruned, with the scores of their units, and what cannot."""
    found = blocks_of(program, wanted) if "blocks" in wanted.kinds else coupling(program)
    of_kind = [group for group in found.groups if group.kind in wanted.kinds]
    obstacles = [(group, _obstacle(program, group, wanted)) for group in of_kind]
    groups = [group for group, reason in obstacles if reason is None]
    check_names(wanted, [group.name for group in groups])
    left_out = [Refused(group.name, reason) for group, reason in obstacles if reason is not None]
    scores = scores_of_units(program, groups, wanted)
    scored = [(group, score) for group, score in zip(groups, scores, strict=True) if isinstance(score, Tensor)]
    unscored = [Refused(g.name, str(s)) for g, s in zip(groups, scores, strict=True) if isinstance(s, NoScores)]
    return scored, [*found.refused, *left_out, *unscored]


def _with_reasons(error: BudgetError, refused: Sequence[Refused]) -> BudgetError:
    """Say, of a budget that is missed, what stays whole."""
    reasons = [f"{each.at}: {each.reason}" for each in _refusals(refused)]
    return BudgetError("; ".join((str(error), *(["these stay whole", *reasons[:3]] if reasons else ()))))


def _kept(
    program: Program, scored: Sequence[tuple[Group, Tensor]], wanted: Options, refused: Sequence[Refused]
) -> tuple[list[Chosen], Cost, list[Refused]]:
    """Return what is kept of each group, by which cost, and the groups without whose units the model does not run."""
    cost, failing = cost_of(program, wanted.target), list[Refused]()
    while scored:
        groups, scores = [group for group, _ in scored], [score for _, score in scored]
        try:
            ranking = Ranking(groups, scores, wanted, multiples_of(program, groups, wanted.round_to))
            is_exact = wanted.target == "units"
            return ranking.choose(wanted.amount) if is_exact else chosen_for_target(ranking, cost), cost, failing
        except BudgetError as error:
            raise _with_reasons(error, (*refused, *failing)) from error
        except DoesNotRun as signal:
            reasons = signal.reasons
            failing += [Refused(name, reason) for name, reason in reasons.items()]
            scored = [(group, score) for group, score in scored if group.name not in reasons]
    if wanted.target != "units" and wanted.amount:
        nothing = f"amount={wanted.amount:g} of the {wanted.target} cannot be removed; no unit of the model can"
        raise _with_reasons(BudgetError(nothing), (*refused, *failing))
    return [], cost, failing


def _obstacle(program: Program, group: Group, wanted: Options) -> str | None:
    owners = dict.fromkeys(cut.tensor.rpartition(".")[0] for cut in group.cuts)
    word = next(filter(None, (word_for(wanted.keep, owner, program) for owner in owners)), None)
    if word is not None:
        return f"it has to keep its units: keep={word}"
    if group.router is not None:
        return _too_few(group, wanted)
    return "it has one unit only" if group.size < 2 else None


def _too_few(group: Group, wanted: Options) -> str | None:
    """Return why so many experts cannot go: each token goes to several."""
    goes_to = f"each token goes to {group.least} of its {group.size} experts"
    if group.size <= group.least:
        return goes_to
    left = group.size - round(wanted.share_of(group.name) * group.size)
    is_exact = wanted.scope == "layer" and wanted.target == "units"
    return f"{goes_to}, and amount={wanted.amount:g} would leave {left}" if is_exact and left < group.least else None


def _refusals(refused: Sequence[Refused]) -> Iterator[Refusal]:
    """Yield one refusal for each reason; what is as it has to be is none."""
    layers: dict[str, list[str]] = defaultdict(list)
    for each in refused:
        if not each.by_design:
            layers[each.reason].append(each.layer)
    for reason, names in layers.items():
        others = "is 1 more layer" if len(names) == 2 else f"are {len(names) - 1} more layers"
        shown = ", ".join(names[1:4]) + (", ..." if len(names) > 4 else "")
        more = "" if len(names) == 1 else f" (so {others}: {shown})"
        yield Refusal(f"{reason}{more}", at=names[0])
