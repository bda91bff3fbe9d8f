"""A front in a folder: what `front.json` says, and the weights of points that were trained; no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..deploy.container import read_weights, stored_once, weights_bytes
from ..errors import ArchiveError, InputError, PlanError, UsageError, one_line
from ..storage import write_atomically
from .demands import Bound, parse_objective
from .points import Aim, Point

__all__ = ["Findings", "load_state", "save_state"]

SCHEMA_VERSION = 1
_FILE = "front.json"


@dataclass(frozen=True)
class Findings:
    """What a front is but for models and weights."""

    aim: Aim
    original: Point
    trials: Sequence[Point]
    notes: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        aim = self.aim
        return {
            "schema_version": SCHEMA_VERSION,
            "objective": aim.objective,
            "minimize": aim.minimize,
            "has_metric": aim.has_metric,
            "bounds": [[b.name, b.number, b.is_share, b.text, b.higher] for b in aim.bounds],
            "front": [point.number for point in aim.unbeaten((self.original, *self.trials))],
            "original": self.original.to_json(),
            "trials": [point.to_json() for point in self.trials],
            "notes": list(self.notes),
        }

    def write(self, folder: Path) -> None:
        """Write it into a folder that is there."""
        write_atomically(folder / _FILE, json.dumps(self.to_json()))

    @classmethod
    def read(cls, folder: Path) -> Findings:
        """Read what `write` wrote; InputError: the folder holds no front, or a damaged one."""
        try:
            given = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            if given["schema_version"] > SCHEMA_VERSION:
                raise InputError(f"{folder} is of a newer version; upgrade fxopt")
            original = Point.from_json(given["original"], "the original")
            trials = [Point.from_json(each, f"trial {number}") for number, each in enumerate(given["trials"])]
            bounds = [Bound(*each) for each in given["bounds"]]
            objective = parse_objective(given["objective"])
            aim = Aim(objective, bounds, original.figures, bool(given["has_metric"]), bool(given["minimize"]))
            return cls(aim, original, trials, [str(each) for each in given["notes"]])
        except (OSError, ValueError, KeyError, TypeError, PlanError, UsageError) as error:
            raise InputError(f"{folder} holds no front: {type(error).__name__}: {one_line(error)}") from error


def _state_file(folder: Path, number: int) -> Path:
    return folder / f"point-{number}.safetensors"


def save_state(folder: Path, number: int, state: Mapping[str, Tensor]) -> None:
    """Write the trained weights of a point."""
    stored, aliases = stored_once(state)
    stored |= {name: stored[first].clone() for name, first in aliases.items()}
    write_atomically(_state_file(folder, number), weights_bytes(stored))


def load_state(folder: Path, number: int) -> Mapping[str, Tensor]:
    """Read what `save_state` wrote."""
    where = _state_file(folder, number)
    try:
        return read_weights(where, where.read_bytes())
    except OSError as error:
        raise ArchiveError(f"{where}: the trained weights of a point cannot be read: {one_line(error)}") from error
