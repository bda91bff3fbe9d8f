"""Faults that programmers make, put into the syntax tree of a source file one at a time."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Change = Callable[[ast.AST], ast.AST | None]
"""Turns a copy of a node into its faulty form; None drops a statement."""

OTHER_COMPARISON: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OTHER_OPERATOR: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.FloorDiv: ast.Mod, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
OTHER_NAME = {
    "any": "all", "all": "any", "min": "max", "max": "min", "weight": "bias", "bias": "weight",
    "running_mean": "running_var", "running_var": "running_mean", "gamma": "beta", "beta": "gamma",
    "forward": "backward", "backward": "forward", "mul": "div", "layer": "norm", "norm": "layer",
}  # fmt: skip
TRANSPARENT = {"detach", "clone", "contiguous", "flatten", "mT", "squeeze", "unsqueeze", "movedim", "reshape", "sum"}
"""Methods and attributes of a tensor whose receiver often fits in their place."""

NEVER_SWAPPED = {"isinstance", "getattr", "hasattr", "setattr"}
"""Functions whose arguments nobody confuses, since swapping them raises at once."""

SETTINGS = {"eps", "momentum", "dropout"}


@dataclass(frozen=True)
class Fault:
    """One change to one file.

    Attributes:
        path: of the file, from the package's root.
        kind: what sort of mistake it is.
        line, last_line: where the changed node begins and ends.
        position: number of the node in a walk of the whole tree.
        what: the changed code, before and after.
        inside: the qualified name of the function around it, "" at the top of the file.
    """

    path: str
    kind: str
    line: int
    last_line: int
    position: int
    what: str
    inside: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} ({self.inside or 'module'}) {self.kind}: {self.what}"


def faults_in(path: str, source: str) -> list[Fault]:
    """Return every fault that can be put into a source file."""
    tree = ast.parse(source)
    inside = _places(tree)
    found: list[Fault] = []
    for position, node in enumerate(ast.walk(tree)):
        where = inside.get(node)
        if where is None or not hasattr(node, "lineno"):
            continue
        for kind, change in changes(node):
            changed = change(copy.deepcopy(node))
            after = "dropped" if changed is None else ast.unparse(ast.fix_missing_locations(changed))
            first = node.body[-1].lineno if isinstance(node, ast.FunctionDef) else node.lineno
            what = f"{_short(ast.unparse(node))} -> {_short(after)}"
            found.append(Fault(path, kind, first, node.end_lineno or first, position, what, where))
    return found


def mutated(source: str, fault: Fault) -> ast.Module:
    """Return the syntax tree of `source` with a fault of `faults_in` put in."""
    tree = ast.parse(source)
    node = next(node for position, node in enumerate(ast.walk(tree)) if position == fault.position)
    change = next(change for kind, change in changes(node) if kind == fault.kind)
    changed = change(copy.deepcopy(node))
    replaced = ast.Pass() if changed is None else changed
    return ast.fix_missing_locations(_Replace(node, ast.copy_location(replaced, node)).visit(tree))


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:48]} ... {text[-47:]}"


# -- where --------------------------------------------------------------------------------------------------------


def _places(tree: ast.Module) -> dict[ast.AST, str]:
    """Return the nodes that compute something, with the function around each."""
    found: dict[ast.AST, str] = {}

    def visit(node: ast.AST, where: str) -> None:
        found[node] = where
        for child in _computing(node):
            name = getattr(child, "name", "") if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else ""
            visit(child, f"{where}.{name}".strip(".") if name else where)

    for statement in tree.body:
        visit(statement, getattr(statement, "name", ""))
    return found


def _computing(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the children of a node that decide what is computed: no annotations, documentation, types or messages."""
    if isinstance(node, ast.Raise) or _is_documentation(node) or _is_declaration(node):
        return
    skipped = {"annotation", "returns", "decorator_list", "type_comment", "bases"}
    if isinstance(node, ast.FunctionDef) and node.name in ("__str__", "__repr__", "extra_repr"):
        return
    for name, value in ast.iter_fields(node):
        if name not in skipped:
            children = value if isinstance(value, list) else [value]
            yield from (child for child in children if isinstance(child, ast.AST))


def _is_documentation(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_declaration(node: ast.AST) -> bool:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return True
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("cast", "TypeVar", "Refusal", "StateError"):
        return True
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


# -- what ---------------------------------------------------------------------------------------------------------


def changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """Yield the kinds of faults that fit a node."""
    for kinds in (_logic, _arithmetic, _statements, _names, _calls, _loops):
        yield from kinds(node)


def _logic(node: ast.AST) -> Iterator[tuple[str, Change]]:
    match node:
        case ast.Compare(ops=[only]) if type(only) in OTHER_COMPARISON:
            yield "comparison", _other_comparison
        case ast.BoolOp():
            yield "and for or", _other_connective
            yield "condition dropped", _first_condition
        case ast.UnaryOp(op=ast.Not()):
            yield "negation dropped", lambda n: n.operand
        case ast.IfExp():
            yield "branches swapped", lambda n: ast.IfExp(n.test, n.orelse, n.body)
        case _:
            pass


def _arithmetic(node: ast.AST) -> Iterator[tuple[str, Change]]:
    match node:
        case ast.UnaryOp(op=ast.USub()):
            yield "sign dropped", lambda n: n.operand
        case ast.BinOp(op=operator):
            if type(operator) in OTHER_OPERATOR:
                yield "operator", _other_operator
            if isinstance(operator, (ast.Sub, ast.Div, ast.Mod, ast.MatMult, ast.FloorDiv)):
                yield "operands swapped", _swapped_operands
        case ast.Constant(value=bool() | int() | float() as value):
            yield "constant", lambda n: ast.Constant(_other_constant(n.value))
            if type(value) is int:
                yield "off by one below", lambda n: ast.Constant(n.value - 1)
        case _:
            pass


def _statements(node: ast.AST) -> Iterator[tuple[str, Change]]:
    match node:
        case ast.FunctionDef(returns=ast.Name(id="Tensor")) if isinstance(node.body[-1], ast.Return):
            yield "gradient lost", _detached
        case ast.If():
            yield "condition negated", _negated
            if not node.orelse:
                yield "guard dropped", lambda _: None
        case ast.Expr() | ast.AugAssign() if not _is_documentation(node):
            yield "statement dropped", lambda _: None
        case _:
            pass


def _names(node: ast.AST) -> Iterator[tuple[str, Change]]:
    if not isinstance(getattr(node, "ctx", None), ast.Load):
        return
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    if name in OTHER_NAME:
        yield "name", _renamed
    if name in SETTINGS:
        yield "setting", _scaled
    if isinstance(node, ast.Attribute) and name == "mT":
        yield "step left out", lambda n: n.value


def _calls(node: ast.AST) -> Iterator[tuple[str, Change]]:
    if not isinstance(node, ast.Call):
        return
    swappable = len(node.args) > 1 and ast.unparse(node.func) not in NEVER_SWAPPED
    if swappable and not any(isinstance(argument, ast.Starred) for argument in node.args[:2]):
        yield "arguments swapped", _swapped_arguments
    if node.keywords and any(keyword.arg for keyword in node.keywords):
        yield "keyword dropped", _without_keyword
    if isinstance(node.func, ast.Attribute) and node.func.attr in TRANSPARENT:
        yield "step left out", lambda n: n.func.value


def _loops(node: ast.AST) -> Iterator[tuple[str, Change]]:
    if isinstance(node, (ast.For, ast.ListComp, ast.DictComp, ast.GeneratorExp, ast.SetComp)):
        yield "first one skipped", lambda n: _iterating(n, "list({})[1:]")
        yield "order reversed", lambda n: _iterating(n, "list({})[::-1]")
    if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)) and node.generators[0].ifs:
        yield "filter dropped", _unfiltered


def _other_comparison(node: ast.AST) -> ast.AST:
    node.ops = [OTHER_COMPARISON[type(node.ops[0])]()]
    return node


def _other_connective(node: ast.AST) -> ast.AST:
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    return node


def _first_condition(node: ast.AST) -> ast.AST:
    return node.values[1] if len(node.values) == 2 else ast.BoolOp(node.op, node.values[1:])


def _other_operator(node: ast.AST) -> ast.AST:
    node.op = OTHER_OPERATOR[type(node.op)]()
    return node


def _swapped_operands(node: ast.AST) -> ast.AST:
    node.left, node.right = node.right, node.left
    return node


def _swapped_arguments(node: ast.AST) -> ast.AST:
    node.args[:2] = node.args[1::-1]
    return node


def _without_keyword(node: ast.AST) -> ast.AST:
    position = max(i for i, keyword in enumerate(node.keywords) if keyword.arg)
    del node.keywords[position]
    return node


def _other_constant(value: bool | int | float) -> bool | int | float:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value * 1.1 + 1e-3


def _negated(node: ast.AST) -> ast.AST:
    node.test = ast.UnaryOp(ast.Not(), node.test)
    return node


def _detached(node: ast.AST) -> ast.AST:
    last = node.body[-1]
    last.value = ast.Call(ast.Attribute(last.value, "detach", ast.Load()), [], [])
    return node


def _renamed(node: ast.AST) -> ast.AST:
    field = "id" if isinstance(node, ast.Name) else "attr"
    setattr(node, field, OTHER_NAME[getattr(node, field)])
    return node


def _scaled(node: ast.AST) -> ast.AST:
    return ast.BinOp(node, ast.Mult(), ast.Constant(1.1))


def _iterating(node: ast.AST, form: str) -> ast.AST:
    loop = node if isinstance(node, ast.For) else node.generators[0]
    loop.iter = ast.parse(form.format(ast.unparse(loop.iter)), mode="eval").body
    return node


def _unfiltered(node: ast.AST) -> ast.AST:
    node.generators[0].ifs = []
    return node
