"""What a pass is: a frozen value that finds sites in a program and rewrites them."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar, Self, cast

from torch import fx, nn

from ...errors import UsageError, did_you_mean
from ...tracing.program import Program
from ..rewriting import Edit
from ..sites import Goal, Numerics, OwnForward, Phase, Refusal, Site
from .options import format_options, option_types

__all__ = ["FunctionPass", "Pass"]


_BUDGET = 0.05
"""The error that an approximate pass may make, relative to the scale, if it has no option for it."""


class Pass:
    """Base of all passes; subclass it as a frozen dataclass whose fields are the pass's options.

    A subclass's docstring says Before, After and Refuses. It has `find`, and `rewrite` or `finalize`. The class
    attributes are its contract:

    Attributes:
        numerics: what verification demands.
        goal: what measurement demands; only `Goal.SPEED` sites are timed one by one.
        clean_up: whether a site saves too little to be timed; where the whole model is slower, such sites go first.
        phase: when the result is valid.
        keeps_form: whether the results of a pass that changes the function (`Numerics.SEMANTIC`) keep shapes and types.
        own_forward: whether the original forward of a module that the pass rewrote may run where no graph fits a call.
            None: it is right where the pass keeps the function, unless it would leave out a region; else wrong.
        averages: of a pass that acts on the finished model: each process trains on rows of its own, and gradients are
            averaged over all of them.
        trainable: whether what it makes can be trained; where it cannot, no optimizer moves there.
        profiles_itself: `find` says which sites are worth it, or leaves that to the whole model; what they compute in
            float64 is what was there. So sites are neither timed nor, where the pass keeps the function, verified one
            by one, but with the whole model. Those of an approximate pass are verified so where `judgement` says what
            they err by.
        trains_by_call: of a pass that acts on the finished model: it is still called, so that a step of training can be
            compared with one before.
        before: names of passes that must not run earlier than this one.
        after: names of passes that must not run later than this one.
        requires: names of passes that must have run already.
        destroys: pass name -> why it can no longer run once this pass has.
        destroys_later: that holds for a later call of `optimize` too, which is refused; otherwise they run, and find
            nothing.
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
    trains_by_call: ClassVar[bool] = True
    before: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[tuple[str, ...]] = ()
    destroys: ClassVar[Mapping[str, str]] = {}
    destroys_later: ClassVar[bool] = False
    includes: ClassVar[tuple[str, ...]] = ()

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

    @property
    def name(self) -> str:
        """Return the pass's name: the class name in snake_case, the same as its file and pipeline word."""
        return snake_case(type(self).__name__)

    @property
    def error_budget(self) -> float:
        """Return the error that an approximate pass may make, relative to the scale: its option `budget`, or 0.05.

        Raises:
            UsageError: if the option is no positive number, or more than 1: then everything would be right.
        """
        budget: object = getattr(self, "budget", _BUDGET) if self.numerics is Numerics.APPROXIMATE else _BUDGET
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget <= 1:
            raise UsageError(f"pass '{self.name}': budget={budget!r}; give a relative error up to 1, such as 0.01")
        return float(budget)

    @property
    def skippable(self) -> bool:
        """Say whether what the pass finds may be left as it is for want of time.

        So it is with what is made for speed and keeps the function, and with clean-ups. What a user names for anything
        else (memory, size, processes, other results) is done however little time there is, and then checked briefly.
        """
        return self.clean_up or (self.goal is Goal.SPEED and self.numerics in (Numerics.EXACT, Numerics.REASSOCIATED))

    @property
    def finishes(self) -> bool:
        """Say whether the pass acts on the finished model: it has `finalize`, and no `rewrite`."""
        return type(self).finalize is not Pass.finalize

    def check(self, model: nn.Module) -> None:
        """Refuse, before any work, a model or a process that the pass can do nothing for at all.

        Args:
            model: the user's; only read it.

        Raises:
            UsageError: no process group, say, or a dtype that the device lacks; with what to do instead.
        """

    def find(self, program: Program) -> Iterable[Site | Refusal]:
        """Yield every place this pass could rewrite, and every near miss with its reason; change nothing."""
        raise NotImplementedError(f"{type(self).__name__}.find")

    def judges(self, site: Site) -> bool:
        """Say whether `find` has judged a site, as `profiles_itself` says of all.

        Args:
            site: as `find` yielded it.
        """
        return self.profiles_itself

    def judgement(self, site: Site) -> Mapping[str, Any]:
        """Return the figures of a site that `find` has judged: `precision_error`, within the budget, and `speedup`.

        Args:
            site: as `find` yielded it.
        """
        return {}

    def check_memory(self, before: int, after: int) -> None:
        """Make sure that what a pass for memory promised has come about; asked where it found sites.

        Args:
            before: bytes of activations that the model, as it was given, held after a forward in training.
            after: those that the finished model holds.

        Raises:
            BudgetError: it has not; the message says what is held.
        """

    def rewrite(self, site: Site, edit: Edit) -> None:
        """Rewrite one site, through `edit` only."""
        raise NotImplementedError(f"{type(self).__name__}.rewrite")

    def reference(self, site: Site, original: nn.Module) -> nn.Module | None:
        """Return what the rewritten module must be equal to, where the pass changes the function by design.

        A pruned module equals the original with zeros in the place of what is gone; one with integer kernels equals the
        one that simulates them.

        Args:
            site: read only what it carries: the graph may be another one by now.
            original: a copy of the module around the site as it was, to be changed and returned, or replaced. Its
                tensors keep their names: they are mapped like those of a checkpoint.

        Returns:
            The reference, or None: then the rewritten module has to run, to keep the form of its results unless
            `keeps_form` says otherwise, and to come back from checkpoints.
        """
        return None

    def own_forward_of(self, sites: Sequence[Site], module: str) -> OwnForward | None:
        """Return what `own_forward` is for one of the modules whose graphs were rewritten at some sites.

        Args:
            sites: read only what they carry.
            module: its name.
        """
        return self.own_forward

    def finalize(self, model: nn.Module, sites: Sequence[Site]) -> nn.Module:
        """Do to the finished model what cannot be done before: shard, replicate, cut it into stages.

        A pass that has this has no `rewrite`. Its `find` is asked when all rewrites have landed and the whole model has
        been compared; the plan keeps its sites. Under `torch.distributed` every rank calls this, with the sites that
        rank 0 found, and collectives are allowed. Without any site it is not called.

        Args:
            model: a copy of the user's, rewritten; to be changed.
            sites: where, with what `find` decided on in `data`.

        Returns:
            The model that the user gets: this one, whose outputs, and gradients of a training step, are compared with
            those before; or what stands for it.
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
