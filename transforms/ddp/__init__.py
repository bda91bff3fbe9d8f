"""Train replicas of a model in several processes: the pass, and what it finds out about the model."""

from __future__ import annotations

from .ddp import Ddp

__all__ = ["Ddp"]
