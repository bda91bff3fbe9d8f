"""A model before and after as data: its graphs, modules, decisions and what each part costs, for whatever shows it."""

from __future__ import annotations

from .costs import Machine, NodeCost, Profile, measured_machine, profile_of, profiles_of
from .picture import NOW, SCHEMA_VERSION, picture_of, picture_of_programs

__all__ = [
    "NOW", "SCHEMA_VERSION", "Machine", "NodeCost", "Profile", "measured_machine", "picture_of", "picture_of_programs",
    "profile_of", "profiles_of",
]  # fmt: skip
