"""How far what a rewritten module gives may be off: all constants, each with what it was chosen or measured by.

A unit is a unit in the last place of a tensor's scale, which is its largest magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = [
    "AS_GOOD_AS_ZERO", "AT_A_PLACE", "CANCELLED", "CLOSE", "DERIVED", "DOUBLE", "DRIFT", "DRIFT_UNITS", "ECHOES",
    "ENOUGH", "EXACT", "FEW_ROWS", "FLIPS", "IN_MEAN", "JUMPS", "JUMP_UNITS", "LOUD", "MEANING", "NATIVE_FACTOR",
    "NATIVE_UNITS", "NOISE", "NOTHING", "PROBES", "REPORTED", "RESPONSE", "ROUNDING", "SAFETY", "SMALL",
    "STANDS_FOR_INFINITY", "STATE_UNITS", "UNITS", "Tolerance",
]  # fmt: skip


@dataclass(frozen=True)
class Tolerance:
    """An error is allowed up to `relative * |element| + absolute`."""

    relative: float
    absolute: float
    smallest_scale: float = 0.0  # what errors are reported relative to where a tensor's own scale is smaller
    places: int = 0  # in how many places integers and booleans may differ


NOTHING = Tolerance(0.0, 0.0)

# In exact runs

MEANING = 1e-10
"""Of the scale, in float64: what one layer may be off by that is computed in another way, as in a fold."""

EXACT = {torch.float64: Tolerance(MEANING, 2e-13), torch.float32: Tolerance(2e-5, 2e-5)}
"""Of the element and of the scale: a thousand units of float64, as sums in another order make in long reductions."""

DERIVED = 100.0
"""Calls with inputs a hundred times as large, and second derivatives, lose two digits more."""

SAFETY = 64.0
"""Rounding in another order may do this multiple of what rounding was seen to do in a few runs."""

CANCELLED = 256.0
"""A gradient that is zero in theory (of a bias before a batch norm) is as large as rounding makes its neighbours'."""

# In the module's own types

NATIVE_FACTOR = 4.0
"""A rewrite, a layer or an optimizer's step may err 4 times as much as the original, whose run may be a lucky one."""

NATIVE_UNITS = 8.0
"""And by these units, whatever the original errs: it may err by nothing at all."""

DOUBLE = 1e-9
"""Of the scale, converted to float64: between the 1e-16 of float64 and the 1e-8 that one cast to float32 leaves."""

ROUNDING = 1e-12
"""Of the arguments, in float64: what is left where numbers as large as they cancel, as in a norm of equal values."""

CLOSE = {torch.float64: MEANING, torch.float32: 2e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
"""Of the scale, in a whole model: what needs no look at float64; 4 units in narrow types."""

STATE_UNITS = 16
"""What the state map computes, as it computes it, and what a module holds may differ by: a fold takes few steps."""

# What is no scale of its own

STANDS_FOR_INFINITY = 1e30
"""Masks are filled with finfo.min; such values must agree, but they are nobody's scale."""

NOISE = 0.5
"""A tensor of which the original, in its own types, gets half the scale wrong has no scale of its own."""

AS_GOOD_AS_ZERO = 1e-6
"""A tensor that is smaller than this part of all others of its kind is judged beside them: float32 has seven digits."""

REPORTED = 1e-12
"""Errors of a tensor are told relative to this part of all others of its kind at the least: it may be all zero."""

SMALL = 64
"""A tensor with fewer elements may come out right by luck: its own error is then read off the other tensors too."""

# What is learned where a difference is too large: rounding puts a ReLU, or an argmax, on its other side

ECHOES, PROBES = 4, 8
"""So many runs with the last bits of inputs and state changed: exact ones, and those in the module's own types."""

UNITS = 4.0
"""Inputs and state are off by so many units then: about what a layer before makes of them."""

JUMP_UNITS = 32.0
"""The same where only gradients are off: of few ReLUs that fall on the other side, none may have done so before."""

FLIPS = 4
"""Integers may differ in 4 times as many places as rounding was seen to change."""

RESPONSE = 2.0
"""Gradients may move twice as far as they were seen to where inputs and state are off by the error of the results."""

# An error that goes one way

LOUD = 0.1
"""Where rounding moves elements by this part of their size, it is chaos that drifts, and nobody's mistake."""

ENOUGH = 16
"""A tensor of fewer elements says nothing of how rounding averages out."""

DRIFT, DRIFT_UNITS = 4.0, 2.0
"""The mean may be off 4 times as far as the original's or one rounding's, or 4 deviations of it, and by 2 units."""

# How far gradients of a whole batch jump where a few rows were the same in float64

FEW_ROWS = 3
"""So many rows tell in float64 what a larger batch means."""

JUMPS = 4.0
"""All may be off by four times as much as was seen."""

IN_MEAN, AT_A_PLACE = 0.1, 0.5
"""No gradient is off by more, of itself in the root of the mean square and of its scale, however far those of the
original jump. Measured on images that lie channels last: 0.01 and 0.12 on a ResNet-18, 0.05 and 0.22 on a ResNet-50."""
