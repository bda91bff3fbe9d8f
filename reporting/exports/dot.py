"""A picture in the language of Graphviz."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .drawing import Drawn, Group, grouped, sides_of

__all__ = ["dot"]

MADE = "#cfe8d2"
"""Fills what a pass has made."""


def dot(picture: Mapping[str, Any]) -> str:
    """Return a picture as a `digraph`: modules are clusters, and what a pass has made is filled."""
    return "\n".join(_lines(picture)) + "\n"


def _lines(picture: Mapping[str, Any]) -> Iterator[str]:
    yield f"digraph {_quoted(picture['title'])} {{"
    yield '  node [shape=box, fontname="sans-serif"];'
    for number, side in enumerate(sides_of(picture)):
        names = {node.id: f"n{number}_{place}" for place, node in enumerate(side.nodes)}
        yield from _cluster(grouped(side), f"{number}", names, "  ")
        for node in side.nodes:
            yield from (f"  {names[read]} -> {names[node.id]};" for read in node.inputs)
    yield "}"


def _cluster(group: Group, name: str, names: Mapping[str, str], indent: str) -> Iterator[str]:
    yield f"{indent}subgraph cluster_{name} {{"
    yield f"{indent}  label={_quoted(group.title)};"
    yield from (f"{indent}  {names[node.id]} [{_attributes(node)}];" for node in group.nodes)
    for number, inner in enumerate(group.groups.values()):
        yield from _cluster(inner, f"{name}_{number}", names, f"{indent}  ")
    yield f"{indent}}}"


def _attributes(node: Drawn) -> str:
    told = "\n".join(f"{key}: {text}" for key, text in node.attributes.items())
    label = f"{node.label}\n{node.value}" if node.value else node.label
    found = [f"id={_quoted(node.id)}", f"label={_quoted(label)}", f"tooltip={_quoted(told)}"]
    return ", ".join([*found, f'style=filled, fillcolor="{MADE}"'] if node.made_by else found)


def _quoted(text: str) -> str:
    """Return text as a string of DOT, in which nothing is replaced: backslashes would name the node or the graph."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;")
    return '"' + "\\n".join(escaped.splitlines()) + '"'
