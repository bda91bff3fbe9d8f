"""A picture for other tools: Graphviz, Mermaid, Model Explorer, networkx, and whatever reads JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from .dot import dot
from .mermaid import mermaid
from .model_explorer import model_explorer, times_of_nodes
from .networks import to_networkx

__all__ = ["FORMATS", "json_text", "times_of_nodes", "to_networkx"]


def json_text(value: Mapping[str, Any]) -> str:
    """Return plain values as JSON on one line: pictures are large."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")) + "\n"


FORMATS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "dot": dot,
    "mermaid": mermaid,
    "json": json_text,
    "model-explorer": lambda picture: json_text(model_explorer(picture)),
}
"""Name of a format -> what makes its text of a picture."""
