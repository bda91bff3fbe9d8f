"""`log_clip`: the log of an input clipped below, whose gradient does not vanish where it was clipped."""

from .definition import log_clip

__all__ = ["log_clip"]
