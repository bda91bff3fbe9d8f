"""What a pass is: a frozen value that finds sites in a program and rewrites them."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Self, cast

from torch import fx, nn

from ...errors import UsageError, did_you_mean
from ...known_passes import TRANSFORMS
from ...pass_order import ORDER
from ...runtime.record import Decision
from ...tracing.program import Program
from ..rewriting import Edit
from ..sites import Goal, Numerics, OwnForward, Phase, Refusal, Site
from .options import format_options, option_types

__all__ = ["FunctionPass", "Pass"]


_BUDGET = 0.05  # the error that an approximate pass may make, relative to the scale, if it has no option for it


class Pass:
    """Base of all passes; subclass it as a frozen dataclass whose fields are the pass's options.

    A subclass's docstring says Before, After and Refuses. It has `find`, and `rewrite` or `finalize`. The class
    attributes are its contract:

    Attributes:
        numerics: what verification demands.
        goal: what measurement demands; only `Goal.SPEED` sites are timed one by one.
        clean_up: a site saves too little to be timed; where the whole model is slower, such sites go first.
        phase: when the result is valid.
        keeps_form: whether the results of a pass that changes the function (`Numerics.SEMANTIC`) keep shapes and types.
        own_forward: whether a rewritten module may run its original forward where no graph fits a call. None: if the
            pass keeps the function, and no region would be left out.
        averages: of a pass with `finalize`: each process trains on its own rows, and gradients are averaged over all.
        trainable: whether what it makes can be trained; where it cannot, no optimizer moves there.
        profiles_itself: `find` says which sites are worth it, or leaves that to the whole model: sites are not timed,
            and verified with the whole model. So are those of an approximate pass whose `judgement` tells their error.
        contested: it takes parts of the model that passes behind it would rewrite in another way. Where its gain is
            small, these run once more without what it did, and the faster of the two models stays.
        yields: it takes parts of the model only where nothing else is faster. Where the whole model gains little, and a
            contested pass is behind, those behind run once more without it, and the faster of the two models stays.
        trains_by_call: of a pass with `finalize`: a step of training can be made by calling the result.
        prepares: of a pass whose result is to be trained: the pass, as text, that takes over what was learned there.
            `fxopt.search` tries both together, where it can train.
        before, after: names of passes that must not run earlier, or later, than this one.
        requires: names of passes that must have run already.
        destroys: pass name -> why it can no longer run once this pass has.
        destroys_later: a later call of `optimize` refuses them too; otherwise they run, and find nothing.
        includes: names of passes whose work this one does on its way: listed before it they run behind it, on the rest.
    """

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    goal: ClassVar[Goal] = Goal.SPEED
    clean_up: ClassVar[bool] = False
    phase: ClassVar[Phase] = Phase.BOTH
    keeps_form: ClassVar[bool] = True
    own_forward: ClassVar[OwnForward | None] = None
    averages: ClassVar[bool] = False
    trainable: ClassVar[bool] = True
    profiles_itself: ClassVar[bool] = False
    contested: ClassVar[bool] = False
    yields: ClassVar[bool] = False
    trains_by_call: ClassVar[bool] = True
    prepares: ClassVar[str] = ""
    before: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[tuple[str, ...]] = ()
    destroys: ClassVar[Mapping[str, str]] = {}
    destroys_later: ClassVar[bool] = False
    includes: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Give one of fxopt's own passes its rules from the table; raise UsageError for names that are no tuple."""
        super().__init_subclass__(**arguments)
        if cls.__module__.startswith(f"{TRANSFORMS}.") and (order := ORDER.get(snake_case(cls.__name__))):
            for rule in fields(order):
                setattr(cls, rule.name, getattr(order, rule.name))
        for rule in ("before", "after", "requires", "includes"):
            if isinstance(names := cls.__dict__.get(rule), str):
                raise UsageError(f"pass {snake_case(cls.__name__)!r}: {rule}={names!r}; give a tuple: ({names!r},)")

    def __new__(cls, *_: Any, **options: Any) -> Self:
        known = dict(inspect.signature(cls.__init__).parameters) if options else {}
        unknown = next((option for option in options if option not in known), None)
        if unknown is not None and all(each.kind is not each.VAR_KEYWORD for each in known.values()):
            hint = did_you_mean(unknown, [*known][1:]) or "; it has none"
            raise UsageError(f"{snake_case(cls.__name__)!r} has no option {unknown!r}{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Take the word of a choice for the choice, as pipeline strings do: `lowering="bmm"`."""
        if not is_dataclass(self):
            return
        for name, wanted in option_types(cast("type[Any]", type(self))).items():
            value = getattr(self, name)
            if isinstance(value, str) and isinstance(wanted, type) and issubclass(wanted, enum.Enum):
                meant = next((member for member in wanted if member.value == value), value)
                object.__setattr__(self, name, meant)  # a pass is frozen, and is being made

    @classmethod
    def searched(cls, phase: Phase, goals: Collection[Goal]) -> Mapping[str, Sequence[Any]] | None:
        """Return what `fxopt.search` tries of the options in a phase: name -> values, numbers by how much they change.

        None: the pass takes part in presets only. `goals` says what is looked for: speed, memory, size.
        """
        return None

    @property
    def name(self) -> str:
        """Return the pass's name: the class name in snake_case, the same as its file and pipeline word."""
        return snake_case(type(self).__name__)

    @property
    def error_budget(self) -> float:
        """Return the error that an approximate pass may make, relative to the scale: its option `budget`, or 0.05.

        Raises UsageError unless that is in (0, 1].
        """
        budget: object = getattr(self, "budget", _BUDGET) if self.numerics is Numerics.APPROXIMATE else _BUDGET
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget <= 1:
            raise UsageError(f"pass '{self.name}': budget={budget!r}; give a relative error up to 1, such as 0.01")
        return float(budget)

    @property
    def skippable(self) -> bool:
        """Say whether what the pass finds may be left for want of time: if it is for speed and exact, or a clean-up.

        What a user names for anything else (memory, size, processes) is done all the same, and checked briefly.
        """
        return self.clean_up or self.only_speeds_up

    @property
    def only_speeds_up(self) -> bool:
        """Say whether the pass is for speed and keeps the function."""
        return self.goal is Goal.SPEED and self.numerics.keeps_function

    @property
    def finishes(self) -> bool:
        """Say whether the pass acts on the finished model: it has `finalize`, and no `rewrite`."""
        return type(self).finalize is not Pass.finalize

    def rows(self, rank: int, size: int) -> tuple[int, int]:
        """Return which rows of a batch a rank of so many trains on, by number, and of how many.

        Ranks of equal numbers get the same rows; gradients are averaged over all. By default `averages` decides.
        """
        return (rank, size) if self.averages else (0, 1)

    def check(self, model: nn.Module) -> None:
        """Raise UsageError, before any work, for a model or process that the pass can do nothing for."""

    def find(self, program: Program) -> Iterable[Site | Refusal]:
        """Yield every place this pass could rewrite, and every near miss with its reason; change nothing."""
        raise NotImplementedError(f"{type(self).__name__}.find")

    def judges(self, site: Site) -> bool:
        """Say whether `find` has judged a site, as `profiles_itself` says of all."""
        return self.profiles_itself

    def judgement(self, site: Site) -> Mapping[str, Any]:
        """Return the figures of a site that `find` has judged: `precision_error`, within the budget, and `speedup`."""
        return {}

    def peer(self, model: nn.Module) -> AbstractContextManager[object] | None:
        """Return a new context in which torch makes the same approximation of a whole model, or None.

        What the original errs in it in training is allowed, beside the error budget.
        """
        return None

    def check_memory(self, before: int, after: int) -> None:
        """Raise BudgetError where a pass for memory has not kept its promise; asked where it found sites.

        `before`, `after`: bytes of activations that the given and the finished model hold after a training forward.
        """

    def check_decisions(self, decisions: Sequence[Decision]) -> None:
        """Raise BudgetError where the decisions on the pass's sites leave less than it promised; all stand by now."""

    def seconds_to_write(self, site: Site) -> float:
        """Return about how much processor time it takes to rewrite a site as its `choice` says, or in the way that
        takes least; 0 where that is little.
        """
        return 0.0

    def rewrite(self, site: Site, edit: Edit) -> None:
        """Rewrite one site, through `edit` only."""
        raise NotImplementedError(f"{type(self).__name__}.rewrite")

    def settle(self, site: Site) -> None:
        """Finish what was written at a site and stands, once the whole model was compared, if there is time."""

    def reference(self, site: Site, original: nn.Module) -> nn.Module | None:
        """Return what the rewritten module must be equal to, where the pass changes the function by design.

        A pruned module equals the original with zeros for what is gone. Read of `site` only what it carries. `original`
        is a copy of the module around it, to be changed and returned, or replaced; its tensors keep their names. None:
        the rewritten module has to run, keep the form of its results (`keeps_form`), and come back from checkpoints.
        """
        return None

    def own_forward_of(self, sites: Sequence[Site], module: str) -> OwnForward | None:
        """Return what `own_forward` is for the module of this name, whose graphs were rewritten at some sites."""
        return self.own_forward

    def finalize(self, model: nn.Module, sites: Sequence[Site]) -> nn.Module:
        """Do to the finished model what cannot be done before (shard, replicate, cut into stages); excludes `rewrite`.

        `find` is asked after all rewrites have landed. Under `torch.distributed` every rank calls this, with the sites
        that rank 0 found; collectives are allowed. Without any site it is not called. Change and return `model`, whose
        outputs and gradients are compared with those before, or return what stands for it.
        """
        return model

    def rewrite_group(self, sites: Sequence[Site], edit: Edit) -> None:
        """Rewrite several sites of one graph, in order; a pass may know a cheaper way than one after another."""
        for site in sites:
            with edit.at(site):
                if site is not sites[0]:
                    site.check_there()
                self.rewrite(site, edit)

    def __str__(self) -> str:
        return f"{self.name}{format_options(self)}" if is_dataclass(self) else self.name


@dataclass(frozen=True)
class FunctionPass(Pass):
    """Run a plain function on each captured module, given and returned as a `GraphModule`.

    Before: any captured module        After: what the function made of its graph
    Refuses: nothing of its own; what it returns is checked like any other rewrite.
    """

    function: Callable[[fx.GraphModule], fx.GraphModule]

    goal: ClassVar[Goal] = Goal.SIZE

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def find(self, program: Program) -> Iterable[Site]:
        for owner, capture in program.captures.items():
            for specialization in range(len(capture.specializations)):
                yield Site(program, owner, {}, specialization)

    def rewrite(self, site: Site, edit: Edit) -> None:
        edit.run_function(self.function)

    def __str__(self) -> str:
        return self.name


@functools.cache
def snake_case(name: str) -> str:
    """Return `FuseEnsembles` as `fuse_ensembles`."""
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
