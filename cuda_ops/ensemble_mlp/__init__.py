"""`ensemble_mlp`: small multilayer perceptrons, equal in form, all computed at once."""

from .definition import ensemble_mlp

__all__ = ["ensemble_mlp"]
