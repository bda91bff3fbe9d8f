"""Operators of fxopt (`torch.ops.fxopt.*`): a reference each, which is the truth on every device, and kernels for GPUs.
Importing this needs neither a GPU nor Triton nor a compiler.
"""

from torch import ops

from . import triples
from .add import add
from .bernoulli_sigmoid import bernoulli_sigmoid
from .bias_act import bias_act
from .bias_act.decompositions import KERNELS as _OF_BIAS_ACT
from .compiled import compiled_kernels
from .definition import Kernel, defined, written_out
from .ensemble_mlp import ensemble_mlp
from .gated import geglu, swiglu
from .gated.decompositions import KERNELS as _OF_GATED
from .gpu import kernels_compute_on, kernels_in_use
from .linear_cross_entropy import linear_cross_entropy
from .linear_cross_entropy.decompositions import KERNELS as _OF_LINEAR_CROSS_ENTROPY
from .log_clip import log_clip
from .norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from .norms.decompositions import KERNELS as _OF_NORMS
from .rotary_embedding import rotary_embedding
from .rotary_embedding.decompositions import KERNELS as _OF_ROTARY_EMBEDDING

__all__ = [
    "KERNELS", "NAMES", "Kernel", "add", "add_layer_norm", "add_rms_norm", "bernoulli_sigmoid", "bias_act",
    "compiled_kernels", "ensemble_mlp", "geglu", "kernels_compute_on", "kernels_in_use", "layer_norm",
    "linear_cross_entropy", "log_clip", "ops", "rms_norm", "rotary_embedding", "swiglu", "triples",
    "written_out",
]  # fmt: skip

NAMES = defined()
"""Their qualified names; all only compute, so exported programs may hold them."""
KERNELS = (*_OF_LINEAR_CROSS_ENTROPY, *_OF_NORMS, *_OF_GATED, *_OF_ROTARY_EMBEDDING, *_OF_BIAS_ACT)
"""Operators that can take the place of what users write, in the order in which they are looked for."""
