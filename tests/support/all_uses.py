"""Every use, by name."""

from __future__ import annotations

from support.uses import calls, children, derivatives, dtypes, hooks, state, tools, training
from support.using import Use

BY_KIND: dict[str, tuple[Use, ...]] = {
    "Calls": calls.USES,
    "Types": dtypes.USES,
    "Derivatives": derivatives.USES,
    "Training": training.USES,
    "State": state.USES,
    "Hooks": hooks.USES,
    "Children and parameters": children.USES,
    "Tools": tools.USES,
}
USES: dict[str, Use] = {each.name: each for uses in BY_KIND.values() for each in uses}
