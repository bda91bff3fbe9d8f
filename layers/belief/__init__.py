"""Restricted Boltzmann machines, and the deep belief networks that are stacks of them."""

from .network import DeepBeliefNetwork, DeepBeliefRelaxationNetwork
from .rbm import RBM

__all__ = ["RBM", "DeepBeliefNetwork", "DeepBeliefRelaxationNetwork"]
