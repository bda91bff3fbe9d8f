"""Single calls of a module, and what each was run on."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ....runtime.values import Arguments
from ..execution import Outcome

__all__ = ["Data", "Sample", "Sizes"]


class Data(enum.Enum):
    """What a sample was run on."""

    RECORDED = "on the recorded inputs"
    ROWS = "on another number of rows, scaled and negated"
    ONE_ROW = "on one row"
    SECOND = "second derivatives, on one row"
    ZEROS = "on inputs of zeros"
    NOTHING = "on integers of zero and masks that let nothing pass"
    UNEVEN = "on sizes that differ where the example's are equal"
    LARGER = "on more rows than the example's"
    ALIKE = "on rows that all go the same way"
    NOISY = "on inputs and parameters with noise"

    @property
    def is_derived(self) -> bool:
        """Say whether the call is one that verification thought of."""
        return self not in (Data.RECORDED, Data.NOISY)

    @property
    def is_at_bends(self) -> bool:
        """Say whether the call is where functions have bends: at zero."""
        return self in (Data.ZEROS, Data.NOTHING)


class Sizes(enum.Enum):
    """Which calls of a module are run.

    Smaller ones have fewer rows, shorter sequences and smaller images, where the module takes them.
    """

    RECORDED = "as recorded"
    SMALLER = "smaller"
    SMALLER_AND_RECORDED = "smaller, and in the module's own types as recorded, too"


@dataclass(frozen=True)
class Sample:
    """One call of the original module, and what came of it.

    Attributes:
        data: what the arguments and the state are.
        arguments: of the call, in the module's own types.
        state: parameters and buffers by their old names, in the module's own types.
        exact: the run in the widest type that works.
        native: the run in the module's own types; None where the sample is about meaning only.
    """

    data: Data
    arguments: Arguments
    state: Mapping[str, Tensor]
    exact: Outcome
    native: Outcome | None = None
