"""Hand regions of a model over to engines that compute them faster: the pass, the regions, how they are written."""

from __future__ import annotations

from .delegate import Delegate

__all__ = ["Delegate"]
