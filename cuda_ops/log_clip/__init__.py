"""`log_clip`: the log of an input clipped below, whose gradient does not vanish where it was clipped."""

from .definition import ROWS, log_clip

__all__ = ["ROWS", "log_clip"]
