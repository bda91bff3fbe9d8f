"""Operators of fxopt: a reference each, which is the truth on every device; for most a gradient and a kernel for GPUs.

They are `torch.ops.fxopt.*`, and functions here. Importing this needs neither a GPU nor Triton nor a compiler.
"""

from torch import ops

from . import triples
from .add import add
from .bernoulli_sigmoid import bernoulli_sigmoid
from .bias_act import bias_act
from .definition import defined
from .gated import geglu, swiglu
from .gpu import kernels_in_use
from .linear_cross_entropy import linear_cross_entropy
from .log_clip import log_clip
from .norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from .rotary_embedding import rotary_embedding

__all__ = [
    "NAMES",
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "bernoulli_sigmoid",
    "bias_act",
    "geglu",
    "kernels_in_use",
    "layer_norm",
    "linear_cross_entropy",
    "log_clip",
    "ops",
    "rms_norm",
    "rotary_embedding",
    "swiglu",
    "triples",
]

NAMES = defined()
"""Their qualified names; all only compute, so exported programs may hold them."""
