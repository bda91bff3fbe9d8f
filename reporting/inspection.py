"""How much of a model was captured, module by module, as text and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .wording import clipped, counted, located, printable, several

if TYPE_CHECKING:
    from ..tracing.program import Program

__all__ = ["inspection", "inspection_json"]

SCHEMA_VERSION = 1


def inspection(program: Program) -> str:
    """Return the coverage, the captured modules (equal ones together) and the opaque ones with line and reason."""
    lines = [printable(str(program.coverage()).partition("\n")[0]), ""]
    rows = [(several(names), kind, nodes) for (kind, nodes), names in _equal(program).items()]
    wide = max((len(names) for names, _, _ in rows), default=0)
    kinds = max((len(kind) for _, kind, _ in rows), default=0)
    lines += [f"  {names:<{wide}}  {kind:<{kinds}}  {counted(nodes, 'node')}" for names, kind, nodes in rows]
    if program.opaque:
        lines += ["", "not captured; these run as they are:"]
        lines += [
            f"  {clipped(o.name) or '(root)'}{located(o.location)}: {printable(o.reason)}"
            for o in program.opaque.values()
        ]
    return "\n".join(lines) + "\n"


def inspection_json(program: Program) -> dict[str, Any]:
    """Return what `inspection` says as plain JSON values."""
    return {
        "schema_version": SCHEMA_VERSION,
        "coverage": str(program.coverage()),
        "graphs": {name: len(graph.nodes) for name, graph in program.graphs.items()},
        "opaque": [{"module": o.name, "location": o.location, "reason": o.reason} for o in program.opaque.values()],
    }


def _equal(program: Program) -> dict[tuple[str, int], list[str]]:
    """Return the names of captured modules of one class whose graphs have equally many nodes, each once."""
    found: dict[tuple[str, int], list[str]] = {}
    for key, graph in program.graphs.items():
        name = key.partition("#")[0]
        found.setdefault((type(program.module(name)).__name__, len(graph.nodes)), []).append(name)
    return found
