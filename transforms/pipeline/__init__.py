"""Train a model in stages on several ranks: where it is cut, what crosses, and the module that runs a rank's part."""

from __future__ import annotations

from .line import Line
from .module import PipelineModule
from .pipeline import Pipeline

__all__ = ["Line", "Pipeline", "PipelineModule"]
