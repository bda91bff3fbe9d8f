"""`bernoulli_sigmoid`: probabilities of binary units and a sample of them, reproducible from a seed."""

from .definition import bernoulli_sigmoid

__all__ = ["bernoulli_sigmoid"]
