"""What a module was run on before a rewrite, and what came of it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from ...runtime.values import Arguments
from .execution import Conditions
from .inputs import ServedCall
from .outcome import Outcome
from .runs import Runs

__all__ = ["Data", "Peer", "Reference", "Sample", "Sizes", "Use", "Used", "no_peer"]


class Data(enum.Enum):
    """What a sample was run on; a comment says which mistakes it shows that the others do not."""

    RECORDED = "on the recorded inputs"  # another function
    ROWS = "on another number of rows, scaled and negated"  # the example's batch, signs, bounds or identifiers baked in
    ONE_ROW = "on one row"  # dimensions of one squeezed or broadcast
    SECOND = "second derivatives, on one row"  # a backward without a gradient of its own
    ZEROS = "on inputs of zeros"  # divisions by what may be zero, gradients at bends
    NOTHING = "on integers of zero and masks that let nothing pass"  # rows of padding alone
    UNEVEN = "on sizes that differ where the example's are equal"  # height taken for width, keys for queries
    LARGER = "on more rows than the example's"  # what was cut to the example's size
    ALIKE = "on rows that all go the same way"  # experts that are empty or full
    NOISY = "on inputs and parameters with noise"  # what holds for fresh or equal parameters alone

    @property
    def is_derived(self) -> bool:
        """Say whether the call is one that verification thought of."""
        return self not in (Data.RECORDED, Data.NOISY)

    @property
    def is_at_bends(self) -> bool:
        """Say whether the call is where functions have bends: at zero."""
        return self in (Data.ZEROS, Data.NOTHING)


Peer = Callable[[], AbstractContextManager[object] | None]
"""Opens what torch offers for the same approximation; None where it offers nothing."""


def no_peer() -> None:
    """Return that there is none."""


class Sizes(enum.Enum):
    """Which calls of a module are run; smaller ones have fewer rows and shorter sequences, where it takes them."""

    RECORDED = "as recorded"
    SMALLER = "smaller"
    SMALLER_AND_RECORDED = "smaller, and in the module's own types as recorded, too"


@dataclass(frozen=True)
class Sample:
    """One call of the original module, and what came of it."""

    data: Data  # what the arguments and the state are
    arguments: Arguments  # of the call, in the module's own types
    state: Mapping[str, Tensor]  # parameters and buffers by their old names, in the module's own types
    exact: Outcome  # the run in the widest type that works
    native: Outcome | None = None  # the run in the module's own types; None where the sample is about meaning only


class Use(enum.Enum):
    """What users do with a module besides calling it; a comment says which mistakes it shows."""

    DOUBLE = "as .double()"  # float32 written into the code
    FROZEN = "with frozen parameters"  # gradients of arguments that need those of parameters
    STEPPED = "after its parameters and arguments were changed in place"  # caches that go by identity or address


@dataclass(frozen=True)
class Used:
    """A use, and what came of it."""

    use: Use  # what was done
    # the call, and what its arguments are changed to where they are changed in place
    calls: tuple[Arguments, Arguments]
    state: Mapping[str, Tensor]  # parameters and buffers by name, as they were in the run
    run: Outcome  # of the original
    exact: Outcome | None = None  # the exact run to judge it by, where there is another


@dataclass(frozen=True)
class Reference:
    """Everything that verification needs to know of the module as it was."""

    original: Runs  # runs the module as it was again
    conditions: Conditions  # what it was run under
    state: Mapping[str, Tensor]  # parameters and buffers by name, as they were
    plain: frozenset[str]  # the names of tensors held as plain attributes
    samples: tuple[Sample, ...] = ()  # the runs; empty if there was no call to run
    native_epsilon: float = 0.0  # the resolution of the coarsest float type the module uses
    called: frozenset[str] = frozenset()  # those inner modules that ran
    stream: Outcome | None = None  # the native run of the first call on the plain random stream, where draws are random
    # calls made one after another without gradients, in the module's own types, and what came of each
    served: tuple[tuple[ServedCall, Outcome], ...] = ()
    used: tuple[Used, ...] = ()  # what came of uses besides calls
