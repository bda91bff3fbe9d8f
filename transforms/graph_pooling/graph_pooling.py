"""The pass: pooling of graphs over triples of nodes in the place of other pooling."""

from __future__ import annotations

import operator
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import fx, nn

from ...compat import own_children
from ...errors import StateWarning, UsageError, did_you_mean
from ...passes.contract import Pass, check_option_types
from ...passes.rewriting import Edit
from ...passes.sites import Goal, Numerics, OwnForward, Refusal, Site
from ...runtime.state import ADDED_TENSORS
from ...runtime.values import qualified
from ...tracing.program import Program
from .edges import COARSENING, edges_before, full_name

__all__ = ["GraphPooling"]

_FUNCTIONS = {"global_mean_pool": "mean", "global_add_pool": "add", "global_max_pool": "max"}
_AGGREGATIONS = {"MeanAggregation": "mean", "SumAggregation": "add", "MaxAggregation": "max"}
_READOUTS = ("mean", "add", "max")
_SOURCES = (*_READOUTS, "topk", "sag", "asap", "edge")
_AGGREGATION, _BASIC = "torch_geometric.nn.aggr.", "torch_geometric.nn.aggr.basic."
_OTHERS = {
    "Set2Set": "Set2Set reads the nodes by an LSTM and gives twice as many features: what follows would not fit",
    "SortAggregation": "SortAggregation gives the features of k sorted nodes side by side: what follows would not fit",
    "edge": "EdgePooling scores edges and joins pairs of nodes: its weights cannot score single nodes",
    "asap": "ASAPooling shares nodes out among clusters: its weights have no place where clusters are disjoint",
}
"""What has no counterpart -> why."""


@dataclass(frozen=True)
class GraphPooling(Pass):
    """Pool graphs over triples of nodes: `RO3Pooling` for readouts, `RO3TriadPooling` for coarsening.

    Before: y = global_mean_pool(x, batch)        After: y = self.ro3_pooling(x, edge_index, None, batch)
    Refuses: a readout before which no edge_index, or more than one, goes into message passing; other aggregations;
    coarsening that returns other things than `TopKPooling` does.

    The model computes something else then and has new parameters: train it.

    Options:
        to: `ro3`, what is put in.
        source: what is replaced: `mean`, `add` and `max` readouts, `topk` and `sag` coarsening; by default all
            these. `asap` and `edge` are found, and refused with the reason.
        structure: of `RO3Pooling`: `adjacency`, `distance` or `codegree`.
        triads: of `RO3TriadPooling`: `closed` (wedges in graphs without triangles) or `all`.
        seed: of the new parameters.
    """

    to: str = "ro3"
    source: tuple[str, ...] = ()
    structure: Literal["adjacency", "distance", "codegree"] = "adjacency"
    triads: Literal["closed", "all"] = "closed"
    seed: int = 0

    numerics: ClassVar[Numerics] = Numerics.SEMANTIC
    goal: ClassVar[Goal] = Goal.SIZE
    keeps_form: ClassVar[bool] = False
    own_forward: ClassVar[OwnForward | None] = OwnForward.WRONG

    def __post_init__(self) -> None:
        if isinstance(self.source, str):
            object.__setattr__(self, "source", (self.source,))
        check_option_types(self)
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"pass 'graph_pooling': seed={self.seed}; give a number from 0 to below 2**63")
        if self.to != "ro3":
            raise UsageError(f"pass 'graph_pooling': to={self.to!r} is unknown{did_you_mean(str(self.to), ('ro3',))}")
        for word in self.source:
            if word not in _SOURCES:
                raise UsageError(f"pass 'graph_pooling': source={word!r} is unknown{did_you_mean(word, _SOURCES)}")

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        found = [
            self._found(program, owner, index, node, kind)
            for owner, capture in program.captures.items()
            for index, specialization in enumerate(capture.specializations)
            for node in specialization.graph.nodes
            if (kind := _kind(program, owner, node)) is not None and (not self.source or kind in self.source)
        ]
        for name, opaque in program.opaque.items():
            if type(program.module(name)).__module__.startswith("torch_geometric.nn.sequential"):
                reason = f"it has no graph: {opaque.reason}; write its forward as a module of your own"
                found.append(Refusal(reason, name))
        yield from found or [Refusal("no graph of this model pools with PyTorch Geometric's functions or layers", "")]

    def _found(self, program: Program, owner: str, index: int, node: fx.Node, kind: str) -> Site | Refusal:
        if kind in _READOUTS:
            return self._readout(program, owner, index, node)
        at = qualified(owner, str(node.target))
        if kind not in COARSENING.values():
            why = _OTHERS.get(kind, f"{kind} is another function than mean, sum and maximum")
            return Refusal(f"{why}; use RO3Pooling in the model's code", at)
        if kind in _OTHERS:
            return Refusal(f"{_OTHERS[kind]}; use RO3TriadPooling in the model's code", at)
        if getattr(program.callee(owner, node), "min_score", None) is not None:
            return Refusal("min_score counts shares of all nodes, which triads do not have", at)
        data = {"kind": kind}
        return Site(program, owner, {"pool": node.name}, index, data=data, detail=f"{kind} pooling by triads", label=at)

    def _readout(self, program: Program, owner: str, index: int, node: fx.Node) -> Site | Refusal:
        at, given = qualified(owner, node.name), _given(node)
        x = given.get("x")
        shape = getattr(x.meta.get("val"), "shape", None) if isinstance(x, fx.Node) else None
        if not isinstance(x, fx.Node) or shape is None:
            return Refusal("how many features its nodes have is not known; give example_inputs", at)
        if len(shape) != 2:
            return Refusal(f"its features have {len(shape)} dimensions; RO3Pooling takes [nodes, features]", at)
        if given.get("ptr") is not None or given.get("dim", -2) not in (-2, 0):
            return Refusal("it aggregates over ptr or another dimension", at)
        edges = edges_before(program, owner, x, given.get("batch"))
        if isinstance(edges, Refusal):
            return edges
        data = {"channels": int(shape[1]), "kind": "readout", "place": _place(program, owner, node)}
        nodes = {"pool": node.name, "edges": edges.name}
        return Site(program, owner, nodes, index, data=data, detail=f"a readout of {int(shape[1])} channels", label=at)

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = site["pool"]
        if site.data["kind"] != "readout":
            edit.replace_module(node, self._coarsening(edit.owner.get_submodule(str(node.target))))
            return
        given = _given(node)
        name = _made_before(site, edit.owner) or edit.add_owned(self._readout_of(site, edit.owner), name="ro3_pooling")
        batch = given.get("batch")
        size = given.get("size") if batch is not None else None
        edges = site["edges"]
        if edges.op == "call_module":  # coarsening, whose new edges nobody else reads
            edges = edit.call(operator.getitem, edges, 1)
        edit.replace(node, edit.call(name, given["x"], edges, None, batch, size, before=node))

    def _coarsening(self, old: Any) -> nn.Module:
        """Return what pools triads with the scorer of `TopKPooling` or `SAGPooling`, its parameters included."""
        from ...layers.pooling import RO3TriadPooling, SAGTriadPooling  # PyTorch Geometric takes seconds

        options: dict[str, Any] = {
            "ratio": old.ratio if old.ratio < 1 else int(old.ratio), "triads": self.triads,
            "multiplier": old.multiplier, "nonlinearity": old.select.act,
        }  # fmt: skip
        if hasattr(old, "gnn"):
            new = SAGTriadPooling(old.gnn, **options)
        else:
            new = RO3TriadPooling(old.in_channels, **options)
        new.select.weight = old.select.weight
        return new

    def _readout_of(self, site: Site, beside: nn.Module) -> nn.Module:
        """Return a new readout with parameters drawn from the seed and the place, where those of the model are."""
        from ...layers.pooling import RO3Pooling  # PyTorch Geometric takes seconds

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + zlib.crc32(f"{site.owner}/{site.nodes['pool']}".encode()))
            module = RO3Pooling(site.data["channels"], self.structure)
        near = next((p for p in beside.parameters() if p.is_floating_point()), None)
        module = module if near is None else module.to(near)
        for part in module.modules():
            own = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
            added = tuple(name for name, _ in own)
            if added:
                part.__dict__[ADDED_TENSORS] = added
        module.register_load_state_dict_pre_hook(_keep_what_is_missing)
        module.__dict__[_PLACE] = site.data["place"]
        return module


_PLACE = "_fxopt_place"


def _place(program: Program, owner: str, node: fx.Node) -> str:
    """Return where a readout is in the code: the same call may be in several graphs, of training and of evaluation."""
    source = node.meta.get("source")
    alike = [n for n in node.graph.nodes if n.meta.get("source") == source and _kind(program, owner, n) in _READOUTS]
    return f"{source} {alike.index(node)}"


def _made_before(site: Site, owner: nn.Module) -> str | None:
    """Return the name of the readout that the same call has in another graph of the module."""
    calls = site["pool"].graph.find_nodes(op="call_module")
    called = {owner.get_submodule(str(node.target)) for node in calls}  # in the graph of the site already
    for name, child in own_children(owner).items():
        made = None if child is None else child.__dict__.get(_PLACE)
        if made == site.data["place"] and child not in called:
            return name
    return None


def _keep_what_is_missing(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let a checkpoint from before the pass load: what it lacks keeps its values, and a warning says so."""
    missing = {prefix + name: tensor for name, tensor in module.state_dict().items() if prefix + name not in state_dict}
    if missing:
        state_dict.update(missing)
        said = ", ".join(missing)
        warnings.warn(f"the checkpoint has no {said}: they keep their values", StateWarning, stacklevel=2)


def _kind(program: Program, owner: str, node: fx.Node) -> str | None:
    """Return which pooling a node is, or None."""
    if node.op == "call_function":
        module = getattr(node.target, "__module__", "")
        return (
            _FUNCTIONS.get(getattr(node.target, "__name__", "")) if module == "torch_geometric.nn.pool.glob" else None
        )
    if node.op != "call_module":
        return None
    called = full_name(program.callee(owner, node))
    if called.startswith(_AGGREGATION):
        return _AGGREGATIONS.get(called.removeprefix(_BASIC), called.rpartition(".")[2])
    return COARSENING.get(called)


def _given(node: fx.Node) -> Mapping[str, Any]:
    """Return the arguments of a readout by the names of `global_mean_pool`, `ptr` and `dim` besides."""
    is_module = node.op == "call_module"
    names = ("x", "batch", "ptr", "size", "dim") if is_module else ("x", "batch", "size")
    other = {"index": "batch", "dim_size": "size"}
    return {**dict(zip(names, node.args, strict=False)), **{other.get(k, k): v for k, v in node.kwargs.items()}}
