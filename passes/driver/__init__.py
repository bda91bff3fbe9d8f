"""One run: groups of sites, candidates, choosing among them, keeping or undoing; the record."""

from __future__ import annotations

from .context import Progress, Request, RunContext
from .groups import Group, grouped, with_lowering
from .halving import longest_right
from .manager import Manager
from .results import check_optimizer, hand_over, lost_hooks_text, move_optimizer, restored
from .root import make_root, remember
from .run import check_kind, copied, run_session

__all__ = [
    "Group", "Manager", "Progress", "Request", "RunContext", "check_kind", "check_optimizer", "copied", "grouped",
    "hand_over", "longest_right", "lost_hooks_text", "make_root", "move_optimizer", "remember", "restored",
    "run_session", "with_lowering",
]  # fmt: skip
