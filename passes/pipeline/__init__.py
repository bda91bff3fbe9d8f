"""From text to passes: parser, registry, order, supervision; how ranks agree on a plan."""

from __future__ import annotations

from .alike import Asked, check_alike
from .choosing import PassLike, asked_for, chosen_passes, refuse_unfit, unfinished
from .ending import ending_together
from .order import check_behind, check_order
from .pipeline import parse
from .ranks import Ranks, heard_by_others, heard_of_any, on_all_ranks, optimized_on_all, ranks
from .registry import PassInfo, available, find_pass
from .supervision import supervised, switches_kept
from .twins import as_in_twin

__all__ = [
    "Asked", "PassInfo", "PassLike", "Ranks", "as_in_twin", "asked_for", "available", "check_alike", "check_behind",
    "check_order", "chosen_passes", "ending_together", "find_pass", "heard_by_others", "heard_of_any", "on_all_ranks",
    "optimized_on_all", "parse", "ranks", "refuse_unfit", "supervised", "switches_kept", "unfinished",
]  # fmt: skip
