"""`bernoulli_sigmoid`: probabilities of binary units and a sample of them, reproducible from a seed."""

from .definition import ROW, bernoulli_sigmoid

__all__ = ["ROW", "bernoulli_sigmoid"]
