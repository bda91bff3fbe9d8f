"""A picture as a flowchart of Mermaid, which pages in Markdown draw."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from .dot import MADE
from .drawing import Group, grouped, sides_of

__all__ = ["mermaid"]

_SPECIAL = re.compile(r"[^\w .,:()\[\]/=+*-]", re.ASCII)
"""Letters that mean something to Mermaid, to Markdown or to a browser somewhere; all others stand for themselves."""


def mermaid(picture: Mapping[str, Any]) -> str:
    """Return a picture as a `flowchart`: modules are subgraphs, and what a pass has made is filled."""
    return "\n".join(_lines(picture)) + "\n"


def _lines(picture: Mapping[str, Any]) -> Iterator[str]:
    yield "flowchart TD"
    made: list[str] = []
    for number, side in enumerate(sides_of(picture)):
        names = {node.id: f"n{number}_{place}" for place, node in enumerate(side.nodes)}
        yield from _subgraph(grouped(side), f"{number}", names, "  ")
        for node in side.nodes:
            yield from (f"  {names[read]} --> {names[node.id]}" for read in node.inputs)
        made += [names[node.id] for node in side.nodes if node.made_by]
    if made:
        yield f"  classDef made fill:{MADE},color:#000"
        yield f"  class {','.join(made)} made"


def _subgraph(group: Group, name: str, names: Mapping[str, str], indent: str) -> Iterator[str]:
    yield f"{indent}subgraph g{name}[{_quoted(group.title)}]"
    for node in group.nodes:
        label = f"{node.label}\n{node.value}" if node.value else node.label
        yield f"{indent}  {names[node.id]}[{_quoted(label)}]"
    for number, inner in enumerate(group.groups.values()):
        yield from _subgraph(inner, f"{name}_{number}", names, f"{indent}  ")
    yield f"{indent}end"


def _quoted(text: str) -> str:
    """Return text in quotes: what could be markup as numbers of letters, lines apart."""
    lines = (_SPECIAL.sub(lambda found: f"#{ord(found[0])};", line) for line in text.splitlines())
    return '"' + "<br/>".join(lines) + '"'
