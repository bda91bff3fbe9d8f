"""The command line: what its commands do, what their arguments mean, what is refused before torch is imported."""

from . import commands, diagnosis, search
from .app import app, main
from .prechecks import complete_name, complete_pipeline

__all__ = ["app", "commands", "complete_name", "complete_pipeline", "diagnosis", "main", "search"]
