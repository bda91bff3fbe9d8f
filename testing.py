"""Check that two modules are the same function: for tests of passes, and for users who rewrite models by hand."""

from __future__ import annotations

from torch import nn

from .errors import UsageError, VerificationError
from .passes.sites import Numerics
from .passes.verification import MapState, Verdict, reference, verify
from .runtime.graphs import capture_of
from .runtime.record import state_map_of
from .tracing.examples import check_whole, normalize_inputs

__all__ = ["NotEquivalentError", "assert_equivalent"]


class NotEquivalentError(VerificationError, AssertionError):
    """Two modules are not the same function; the message says where they differ."""


def assert_equivalent(
    before: nn.Module,
    after: nn.Module,
    inputs: object,
    *,
    training: bool | None = None,
    gradients: bool = True,
    map_state: MapState | None = None,
    numerics: Numerics = Numerics.REASSOCIATED,
    budget: float = 0.05,
    seed: int = 0,
) -> Verdict:
    """Compare two modules on `inputs`: outputs, gradients, buffers, types, in float64 and in their own types.

    In float64 they must agree to 1e-10, also with noise on inputs and parameters; in their own types `after` may err
    at most 4 times as much as `before`, plus 8 units in the last place. Neither module is changed. Random draws are
    compared in the order in which they happen.

    Args:
        before: the module that is right.
        after: the module to judge.
        inputs: as the `example_inputs` of `fxopt.optimize`.
        training: compare in this mode; None leaves every flag as it is.
        gradients: compare gradients of arguments and parameters too.
        map_state: from all parameters and buffers of `before` by name to those of `after`. By default that which an
            optimized `after` has on record; names that are the same on both sides otherwise.
        numerics: what is promised; see `Numerics`.
        budget: the error that `Numerics.APPROXIMATE` allows, relative to the scale of each tensor.
        seed: of the noise, the upstream gradients and the random draws.

    Returns:
        The verdict, with the errors found.

    Raises:
        NotEquivalentError: if they differ; it is an AssertionError too.
        UsageError: if there is no call to compare on, or one of a part of the module.
        InputError: if `before` does not run on `inputs`.
    """
    calls = normalize_inputs(inputs, before)
    if not calls:
        raise UsageError("assert_equivalent compares what modules do on inputs; give at least one call")
    check_whole(calls)
    keyed = capture_of(after) is not None
    taken = reference(before, calls, training=training, gradients=gradients, seed=seed, keyed=keyed)
    state_map = state_map_of(after)
    known = dict if state_map is None else state_map.forward
    verdict = verify(taken, after, map_state=map_state or known, numerics=numerics, budget=budget)
    if not verdict.ok:
        raise NotEquivalentError(verdict.reason)
    return verdict
