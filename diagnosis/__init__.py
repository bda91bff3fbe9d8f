"""Look closer at models: how fast one is beside another, which rewrite is at fault, the least that still fails."""

from .bisection import Fault, bisect, command_check, verify_check
from .scripts import Reduced, reduce
from .speeds import Race, race

__all__ = ["Fault", "Race", "Reduced", "bisect", "command_check", "race", "reduce", "verify_check"]
