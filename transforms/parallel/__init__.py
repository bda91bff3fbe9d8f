"""Train over a mesh of processes: replicas, shards, split layers, dealt experts and stages."""

from __future__ import annotations

from .parallel import Parallel

__all__ = ["Parallel"]
