"""What a user should know beside the figures: what was not verified or came to nothing, what forwards print."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ..compat import all_modules
from ..errors import NothingDoneWarning, UnverifiedWarning, UsageError
from ..layers.delegated import held_bytes
from ..passes.driver import lost_hooks_text
from ..passes.pipeline import find_pass, parse
from ..passes.sites import Cause, Phase
from ..runtime.graphs import capture_of
from ..runtime.record import Decision
from ..runtime.values import all_tensors, is_sharded
from ..storage import byte_text
from .wording import slower_sizes

if TYPE_CHECKING:
    from ..runtime.record import Record

__all__ = ["in_one_line", "notes", "warn_of"]

_NEXT = {
    "no example inputs": "give example_inputs, so that each rewrite is compared with the original",
    "empty examples": "give example_inputs with rows: of a call without elements nothing can be compared",
    "verify=False": "leave verify out, so that each rewrite is compared with the original",
}
_TO_SMALL_NUMBERS = ("quantize",)
_NO_PLACE = "it found no place for it in this model"
_BFLOAT16 = "dtype=bfloat16"
_NEAR = 0.005
"""A share that is missed by no more is met."""
_HOLDS_FOR = {
    "sparse_message_passing": "the speed is that of graphs that come again, as in the examples; "
    "calls with a new graph each take about as long as before",
}
"""Pass -> for which calls its figures hold, where that is not for all like the examples."""
_PRINTS = {"print", "logging", "logger", "log", "_logger", "LOGGER"}
_LIBRARIES = ("torch", "transformers", "torch_geometric", "diffusers", "timm")


def notes(record: Record, model: nn.Module) -> list[str]:
    """Return what else to say of an optimized model, a line each."""
    sizes = _bytes(record, model), _left_for_speed(record)
    said = (
        _unverified(record),
        *(() if _in_fewer_bits(record) else record.idle),
        record.remark,
        _in_fewer_bits(record),
        *_costs(record),
        *_metrics(record),
        *sizes,
        *_held_by_engines(model),
        *_holds_for(record),
        _for_sizes(record),
        _of_optimizer(record),
        _for_training(record),
        _sharded(model),
        _printing(model),
        lost_hooks_text(record.lost_hooks),
    )
    return [note for note in said if note]


def _unverified(record: Record) -> str:
    """Say that rewrites stand which nothing was compared for, and what to do; "" where there is none."""
    applied = [d for d in record.plan.decisions if d.status == "applied"]
    for reason, advice in _NEXT.items():
        count = sum(d.figures.get("checked") == f"unverified: {reason}" for d in applied)
        if count:
            said = "a rewrite was" if count == 1 else f"{count} rewrites were"
            return f"{said} not verified ({reason}): {advice}"
    return ""


def _in_fewer_bits(record: Record) -> str:
    """Say that nothing is computed in bfloat16 where that was asked for, nor in int8 where that was too, and why."""
    steps = {
        step: text
        for step, text in enumerate(record.plan.pipeline)
        if _BFLOAT16 in text or text.partition("{")[0] in _TO_SMALL_NUMBERS
    }
    tried = [d for d in record.plan.decisions if d.step in steps]
    if not any(_BFLOAT16 in text for text in steps.values()) or any(d.status == "applied" for d in tried):
        return ""
    quantized = "" if all(_BFLOAT16 in text for text in steps.values()) else "is quantized, and nothing "
    why = tried[0].reason if tried else "no layer was found that can be"
    more = f" ({tried[0].label}, the first of {len(tried)})" if len(tried) > 1 else ""
    return f"nothing {quantized}is computed in bfloat16: {why}{more}"


def _held_by_engines(model: nn.Module) -> Iterator[str]:
    """Say what engines hold beside the model's own tensors."""
    for engine, (size, is_twice) in held_bytes(model).items():
        again = ", twice: once for the sizes of the example, once for all others" if is_twice else ""
        yield f"{engine} holds about {byte_text(size)} more, made of the model's parameters and buffers{again}"


def _holds_for(record: Record) -> Iterator[str]:
    """Say for which calls figures hold that are not those of all calls."""
    standing = {decision.pass_name for decision in record.plan.decisions if decision.status == "applied"}
    yield from (f"{name}: {text}" for name, text in _HOLDS_FOR.items() if name in standing)


def _for_sizes(record: Record) -> str:
    """Say that the model is slower than before on other sizes than the example's, and what to do."""
    slower = [f"{label} ({speed:.3g}x)" for label, speed in slower_sizes(record).items()]
    if not slower:
        return ""
    return (
        f"slower than before with {', '.join(slower)}: the rewrites were chosen for the size of the example; "
        "give as example_inputs calls of the sizes that are used"
    )


def _of_optimizer(record: Record) -> str:
    """Say whose parameters the state of an optimizer is of, where they are others than before."""
    if not record.optimizer or record.parameters_before == record.parameters_after:
        return ""
    return (
        "optimizer.state_dict() is of the parameters of the optimized model: it fits a model optimized by this plan; "
        "after fxopt.restore(model, optimizer=optimizer) it fits the original"
    )


def _costs(record: Record) -> Iterator[str]:
    """Say what the model costs before and after, where a pass that makes it smaller has counted that."""
    for number, decision in enumerate(record.plan.decisions):
        data: Mapping[str, Any] = cast("Any", decision.site)["data"] if decision.site else {}
        if not isinstance(data.get("costs"), dict):
            continue
        mine = [d for d in record.plan.decisions[number:] if d.step == decision.step and d.site]
        standing = [d for d in mine if d.status == "applied"]
        if standing:
            lost = [d for d in mine if d.status != "applied"]
            yield from _cost_of(decision.pass_name, data["costs"], data.get("asked"), lost)


def _metrics(record: Record) -> Iterator[str]:
    """Say what a user's metric was, and what it is with the layers that were chosen by it."""
    for decision in record.plan.decisions:
        found: Any = decision.site and cast("Any", decision.site)["data"].get("metric")
        if not isinstance(found, dict):
            continue
        mine = [each for each in record.plan.decisions if each.step == decision.step and each.site]
        count = sum(each.status == "applied" for each in mine)
        if count:
            where = "" if count == len(mine) else f", measured with {len(mine)} places, of which {count} stand"
            figures = cast("Mapping[str, float]", found)
            values = f"{figures['before']:.4g} -> {figures['after']:.4g}"
            yield f"{decision.pass_name}: the metric {values}; it may fall by {figures['drop']:g}{where}"


def _cost_of(name: str, costs: Mapping[str, list[float]], asked: Any, lost: Sequence[Decision]) -> Iterator[str]:
    """Say what a pass made of costs (name -> before, after), and whether that is less than the share that was asked."""
    left: dict[str, list[float]] = {}
    for what, (before, after) in costs.items():
        saved = [cast("Any", d.site)["data"].get("saves", {}).get(what) for d in lost]
        if None not in saved:
            left[what] = [before, after + sum(saved)]
    yield f"{name}: {', '.join(_shown(what, *pair) for what, pair in left.items())}"
    share, what = asked or (0.0, "")
    reached = 1 - left[what][1] / max(left[what][0], 1e-12) if what in left else None
    if (reached is None and lost and share) or (reached is not None and reached < share - _NEAR):
        less = "less" if reached is None else f"{reached:.3g}"
        why = f": {_sites(lost, what)}" if lost else ", as near as whole units come"
        yield f"{name}: asked {share:g} of the {what}, reached {less}{why}"


def _sites(lost: Sequence[Decision], what: str) -> str:
    names = ", ".join(d.label for d in lost[:3]) + (", ..." if len(lost) > 3 else "")
    return f"undone at {names}" + ("" if what == "units" else "; keep=[...] with these lets others go in their place")


def _shown(what: str, before: float, after: float) -> str:
    if what == "latency":
        return f"{after / before:.0%} of the latency"
    if what == "bytes":
        return f"{byte_text(before)} -> {byte_text(after)}"
    return f"{before:,.0f} -> {after:,.0f} {what} ({after / max(before, 1):.0%})"


def _bytes(record: Record, model: nn.Module) -> str:
    """Say what a model's tensors take where some take less room than before."""
    if not any(step.is_compact for step in record.state_map.steps):
        return ""
    tensors = (all_tensors(all_modules(each)) for each in (record.skeleton, model))
    before, after = (sum(tensor.numel() * tensor.element_size() for tensor in each) for each in tensors)
    return f"parameters and buffers take {byte_text(after)}, {byte_text(before)} before ({after / max(before, 1):.0%})"


def _left_for_speed(record: Record) -> str:
    """Say that more could be small which was left as it was since it is not faster."""
    places = [d for d in record.plan.decisions if d.pass_name in _TO_SMALL_NUMBERS and d.status != "applied"]
    count = sum(Cause(d.cause).is_speed for d in places)
    if not count:
        return ""
    what = "one place was" if count == 1 else f"{count} places were"
    return f"{what} not quantized, since that is no faster there; with aim=size it is, and takes less memory and disk"


def _for_training(record: Record) -> str:
    """Say that passes for training stand in the way of those for inference."""
    applied = dict.fromkeys(d.pass_name for d in record.plan.decisions if d.status == "applied")
    around = [name for name in applied if name not in record.finished_by and _is_for_training(name)]
    if record.plan.phase != "eval" or not around:
        return ""
    return (
        f"{' and '.join(around)} had been run for training: passes for inference do not rewrite what that made; "
        "begin with fxopt.restore(fast)"
    )


def _is_for_training(name: str) -> bool:
    with suppress(UsageError):  # a pass that was given as a value need not be known by its name
        return find_pass(name).phase is Phase.TRAIN
    return False


def _sharded(model: nn.Module) -> str:
    """Say that an optimizer of the parameters before trains nothing."""
    if not any(map(is_sharded, model.parameters())):
        return ""
    return (
        "the parameters are sharded, and are new tensors: an optimizer trains them only if it was given as optimizer=, "
        "or is built on them"
    )


def _printing(model: nn.Module) -> str:
    """Say what becomes of what rewritten forwards print and log."""
    speaking = next((capture_of(module) for module in all_modules(model) if _speaks(module)), None)
    if speaking is None:
        return ""
    return (
        f"the forward of {speaking.base.__name__} prints or logs: fxopt ran it several times to record, check and "
        "time it; where a module runs from its graph, it prints and logs nothing"
    )


def _speaks(module: nn.Module) -> bool:
    capture = capture_of(module)
    if capture is None or capture.inactive or capture.base.__module__.partition(".")[0] in _LIBRARIES:
        return False
    code = getattr(capture.base.forward, "__code__", None)
    return code is not None and not _PRINTS.isdisjoint(code.co_names)


def warn_of(record: Record, asked: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Warn the caller of `optimize` of what nothing was compared for, and of what was asked for and changed nothing."""
    said = list(dict.fromkeys(filter(None, (_said(record, name, texts) for name, texts in asked))))
    idle = "; ".join(said) or _in_fewer_bits(record)
    for kind, text in ((UnverifiedWarning, _unverified(record)), (NothingDoneWarning, idle)):
        if text:
            warnings.warn(text, kind, stacklevel=3)
    record.idle[:] = [each for each in said if each.endswith(_NO_PLACE) or "nothing was done" in each]


def _said(record: Record, name: str, texts: Sequence[str]) -> str:
    if name == "training" and record.plan.phase == "eval":
        return (
            "nothing was done for training: the model is in evaluation, and 'training' was run for inference; call "
            "model.train() first, or give phase='train'"
        )
    if name == "inference" and record.plan.phase == "train":
        return (
            "nothing was done for inference: the model is in training, and 'inference' was run for training; call "
            "model.eval() first (on the command line: --phase eval), or give 'training'"
        )
    applied = {each.pass_name for each in record.plan.decisions if each.status == "applied"}
    if name == "inference" and "delegate" in applied:
        return ""  # an engine computes what it would change
    earlier, wanted = record.earlier_passes, set(texts)
    steps = {step for step, text in enumerate(record.plan.pipeline) if step >= earlier and text in wanted}
    mine = [decision for decision in record.plan.decisions if decision.step in steps]
    if not steps or any(decision.status == "applied" for decision in mine):
        return ""
    if not mine and _is_done_by_another(record, name):
        return ""  # as it is meant: quantize folds norms itself, and fold_batchnorm takes those that it leaves
    return f"{name} changed nothing: {_why(mine)}"


def _is_done_by_another(record: Record, name: str) -> bool:
    """Say whether a pass that has changed something does the work of another one on its way."""
    texts = {record.plan.pipeline[each.step] for each in record.plan.decisions if each.status == "applied"}
    with suppress(UsageError):  # a pass that was given as a value need not be known by its name
        return any(name in pass_.includes for text in texts for pass_ in parse(text))
    return False


def _why(decisions: Sequence[Decision]) -> str:
    if not decisions:
        return _NO_PLACE
    told = next((each for each in decisions if Cause(each.cause).is_measured), decisions[0])  # it was tried
    of = f", one of {len(decisions)} places" if len(decisions) > 1 else ""
    return f"{told.reason} (at {told.label or '(root)'}{of})"


@contextmanager
def in_one_line(*ignored: type[Warning]) -> Generator[None]:
    """Write each warning as one line to standard error, without the line of code that raised it; ignore some."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        sys.stderr.write(f"warning: {message}\n")

    with warnings.catch_warnings():
        for each in ignored:
            warnings.simplefilter("ignore", each)
        warnings.showwarning = show
        yield
