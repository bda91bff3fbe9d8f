"""Operators of fxopt: each has a reference that is the truth on every device, a gradient, and a kernel for GPUs.

They are `torch.ops.fxopt.*`, and functions here. Importing this needs neither a GPU nor Triton nor a compiler.
"""

from torch import ops

from ..operators import register_operator
from .add import ROW as _ADD
from .add import add
from .bernoulli_sigmoid import ROW as _BERNOULLI_SIGMOID
from .bernoulli_sigmoid import bernoulli_sigmoid
from .gpu import kernels_in_use
from .log_clip import ROWS as _LOG_CLIP
from .log_clip import log_clip

__all__ = ["NAMES", "add", "bernoulli_sigmoid", "kernels_in_use", "log_clip", "ops"]

_ROWS = (_ADD, _BERNOULLI_SIGMOID, *_LOG_CLIP)
NAMES = tuple(row.name for row in _ROWS)
"""Their qualified names; all only compute, so exported programs may hold them."""

for _row in _ROWS:
    register_operator(_row)
