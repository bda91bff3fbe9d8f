"""Look closer at models: how fast one is beside another, which rewrite is at fault, the least that still fails."""

from .bisection import Fault, bisect, command_check, verify_check
from .race import Race, race
from .scripts import Reduced, reduce

__all__ = ["Fault", "Race", "Reduced", "bisect", "command_check", "race", "reduce", "verify_check"]
